"""What layers that share their blocks have of their own: `--per-layer`.

An addition is a row of ADDITIONS here, and its module in BUILD of `model/own.py`, apart because a
command line reads this file and must not wait for torch. The module stands at places of every
layer, where `model/encoder.py` runs it:

| place                                                | what the module does there            |
| ---------------------------------------------------- | ------------------------------------- |
| layer.input                                          | transforms the layer's input          |
| attention.query, key, value, output; ffn.up, down    | is added to that projection           |
| attention.result, ffn.result                         | transforms what the residual receives |
| attention.layer_norm, ffn.layer_norm                 | replaces the shared block's           |

All start as nothing: a model with an addition computes at first what it computes without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from albert_ds.errors import UserError

if TYPE_CHECKING:
    from albert_ds.model.config import ModelConfig

# Of each projection: whether its input and its output have the feed-forward width.
PROJECTIONS = {
    **{f"attention.{name}": (False, False) for name in ("query", "key", "value", "output")},
    "ffn.up": (False, True),
    "ffn.down": (True, False),
}
LARGEST = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """A word of --per-layer. `value` is what follows its colon, else 0."""

    form: str  # as it is typed
    meaning: str
    places: tuple[str, ...]
    count: Callable[["ModelConfig", int], int]  # parameters of a layer, for a value


def read_additions(per_layer: str) -> list[tuple[Addition, int]]:
    """The additions of a comma list, each with its value. Raises UserError for a wrong word."""
    found: dict[str, tuple[Addition, int]] = {}
    for word in per_layer.split(",") if per_layer != "none" else []:
        name, colon, value = word.partition(":")
        known = ADDITIONS.get(name)
        is_number = value.isascii() and value.isdecimal() and 1 <= int(value) <= LARGEST
        if known is None or bool(colon) != (":" in known.form) or (colon and not is_number):
            forms = ", ".join(addition.form for addition in ADDITIONS.values())
            raise UserError(
                f"--per-layer {per_layer}: {word!r} must be one of {forms}, R at most {LARGEST}"
            )
        if name in found:
            raise UserError(f"--per-layer {per_layer}: names {name} twice")
        found[name] = (known, int(value or 0))
    return list(found.values())


def widths_of(config: "ModelConfig", projection: str) -> tuple[int, int]:
    """Input and output width of a projection."""
    is_wide_in, is_wide_out = PROJECTIONS[projection]
    widths = (config.hidden_size, config.ffn_size)
    return widths[is_wide_in], widths[is_wide_out]


ADDITIONS: dict[str, Addition] = {
    "norm": Addition(
        form="norm",
        meaning="its own LayerNorms",
        places=("attention.layer_norm", "ffn.layer_norm"),
        count=lambda config, _: 4 * config.hidden_size,
    ),
    "scale": Addition(
        form="scale",
        meaning="a factor on the result of each of its blocks",
        places=("attention.result", "ffn.result"),
        count=lambda config, _: 2,
    ),
    "position": Addition(
        form="position",
        meaning="a vector, the embedding of its number, added to its input",
        places=("layer.input",),
        count=lambda config, _: config.hidden_size,
    ),
    "lora": Addition(
        form="lora:R",
        meaning="a product of rank R added to each of its six projections",
        places=tuple(PROJECTIONS),
        count=lambda config, rank: rank * sum(sum(widths_of(config, p)) for p in PROJECTIONS),
    ),
}
