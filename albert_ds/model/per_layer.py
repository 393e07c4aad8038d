"""What each layer has of its own beside the blocks that it shares: `--per-layer`.

The words of the flag are the rows of ADDITIONS in `model/sharing.py`, which a command line reads
without waiting for torch; their modules are here. A module stands at places of every layer, where
`model/encoder.py` runs it:

| place                                                | what the module does there            |
| ---------------------------------------------------- | ------------------------------------- |
| layer.input                                          | transforms the layer's input          |
| layer.embedded                                       | adds the embedding's output to it     |
| attention.query, key, value, output; ffn.up, down    | is added to that projection           |
| attention.result, ffn.result                         | transforms what the residual receives |
| attention.layer_norm, ffn.layer_norm                 | replaces the shared block's           |

Every addition starts as the identity: a model with it computes at first what it computes without.
Parameters are named `albert.encoder.own.LAYER.PLACE.NAME`.
Shapes: N tokens, H hidden, R rank.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from albert_ds.base.errors import UserError
from albert_ds.base.plugin import Table
from albert_ds.model.config import ModelConfig
from albert_ds.model.draws import Draws
from albert_ds.model.fused import linear_norm, residual_norm
from albert_ds.model.projections import PROJECTIONS, list_projections
from albert_ds.model.sharing import ADDITIONS, find_loops, read_additions

PER_LAYER_PREFIX = "albert.encoder.own."  # of these parameters; the layer comes next


class ResidualNorm(nn.LayerNorm):
    """LN(x + dropout(added)): [N, H] and [N, H] -> [N, H]."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = config.dropout

    def forward(self, x: Tensor, added: Tensor, draws: Draws | None = None) -> Tensor:  # ty: ignore[incompatible-method-override]
        dropout = self.dropout if self.training else 0.0
        return residual_norm(x, added, self.weight, self.bias, self.eps, dropout, draws)

    def after(
        self, x: Tensor, y: Tensor, last: nn.Linear, draws: Draws | None, sums: Mapping
    ) -> Tensor:
        """LN(x + dropout(last(y))), as the end of a fused block."""
        return linear_norm(x, y, last, self, self.dropout if self.training else 0.0, draws, sums)


class Scale(nn.Module):
    """x * scale, a number that starts as 1."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Shift(nn.Module):
    """x + bias, a vector [H] that starts as 0."""

    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Inject(nn.Module):
    """x + gain * embedded + bias: a factor and a vector [H] that start as 0."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        return x + (self.gain * embedded + self.bias)


class LowRank(nn.Module):
    """(x first^T) second^T: [N, in] -> [N, out]; `second` starts as 0 (Hu et al. 2021)."""

    def __init__(self, width_in: int, width_out: int, rank: int):
        super().__init__()
        self.first = nn.Parameter(torch.empty(rank, width_in))
        self.second = nn.Parameter(torch.zeros(width_out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first), self.second)


def build_low_rank(config: ModelConfig, place: str, rank: int) -> LowRank:
    """Of the widths of the projection at this place."""
    widths = PROJECTIONS[place.partition(".")[2]].widths
    return LowRank(*(getattr(config, name) for name in widths), rank)


# Word of --per-layer -> its module, for a place and the number after the word's colon.
BUILD = Table(Callable) | {
    "norm": lambda config, place, value: ResidualNorm(config),
    "scale": lambda config, place, value: Scale(),
    "position": lambda config, place, value: Shift(config.hidden_size),
    "inject": lambda config, place, value: Inject(config.hidden_size),
    "lora": build_low_rank,
}


class PerLayer(nn.Module):
    """What one layer has of its own: its modules by place."""

    def __init__(self, config: ModelConfig, *, begins_loop: bool):
        super().__init__()
        self.layer, self.attention, self.ffn = (nn.ModuleDict() for _ in range(3))
        for word, value in read_additions(config.per_layer).items():
            if ADDITIONS[word].begins_loops and not begins_loop:
                continue
            for place in ADDITIONS[word].places:
                kind, name = place.split(".")
                if name in PROJECTIONS and name not in list_projections(config.feed_forward):
                    continue
                part: nn.ModuleDict = getattr(self, kind)
                assert name not in part, f"two additions at {place}"
                part[name] = BUILD[word](config, place, value)


def build_per_layer(config: ModelConfig) -> nn.ModuleList:
    """One `PerLayer` a layer; empty if --per-layer is none."""
    layers = 0 if config.per_layer == "none" else config.num_layers
    loops = find_loops(config.plan)
    return nn.ModuleList(PerLayer(config, begins_loop=n in loops) for n in range(layers))


def find_unused_parameters(names: Iterable[str], running: list[int]) -> set[str]:
    """Those of the parameters that layers have of their own which do not run."""
    own = (
        (name, name.removeprefix(PER_LAYER_PREFIX))
        for name in names
        if name.startswith(PER_LAYER_PREFIX)
    )
    return {name for name, rest in own if int(rest.partition(".")[0]) not in running}


def fold(config: ModelConfig, state: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A model without additions that computes the same, with one block a layer.

    The factor and the low-rank product go into the projections, a vector on a layer's input into
    the bias of the LayerNorm before it. Raises UserError for an addition that has no such place.
    """
    if config.per_layer == "none":
        return config, state
    encoder = "albert.encoder."
    folded = {name: x for name, x in state.items() if not name.startswith(encoder)}
    for layer, blocks in enumerate(config.plan):
        for kind, block in zip(("attention", "ffn"), blocks, strict=True):
            old, new = f"{encoder}{kind}.{block}.", f"{encoder}{kind}.{layer}."
            folded |= {
                name.replace(old, new): x for name, x in state.items() if name.startswith(old)
            }
    own = [
        (name, *name.removeprefix(PER_LAYER_PREFIX).split("."))
        for name in state
        if name.startswith(PER_LAYER_PREFIX)
    ]
    # A norm takes the place of another one; a factor also multiplies what was added.
    order = ("layer_norm", "input", *PROJECTIONS, "result")
    full = {name: f"{part.module}.{name}" for name, part in PROJECTIONS.items()}
    last = {part.block: full[name] for name, part in PROJECTIONS.items() if part.ends_block}
    own.sort(key=lambda row: (*order, row[3]).index(row[3]))  # by place
    for name, layer, kind, place, leaf in own:
        block = f"{encoder}{kind}.{layer}."
        match place, leaf:
            case "layer_norm", _:
                folded[f"{block}layer_norm.{leaf}"] = state[name]
            case "result", "scale":
                for part in ("weight", "bias"):
                    target = f"{block}{last[kind]}.{part}"
                    folded[target] = folded[target] * state[name]
            case "input", "bias":
                target = f"{encoder}ffn.{int(layer) - 1}.layer_norm.bias"
                if layer == "0":
                    module = "projection" if config.has_map else "layer_norm"
                    target = f"albert.embeddings.{module}.bias"
                folded[target] = folded[target] + state[name]
            case _, "first" if place in full:
                target = f"{block}{full[place]}.weight"
                second = state[name.removesuffix("first") + "second"]
                folded[target] = folded[target] + second @ state[name]
            case _, "second" if place in full:
                pass  # with `first`
            case _:
                raise UserError(
                    f"--per-layer {config.per_layer}: {name} has no place in a model whose layers "
                    "have blocks alone, so it cannot be exported"
                )
    return replace(config, sharing="none", per_layer="none"), folded
