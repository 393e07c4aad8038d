"""What layers share, and what each has of its own: the words of `--sharing` and `--per-layer`.

`--sharing` (section 3.1, Table 4; Takase and Kiyono 2023) gives a plan: one (attention block,
feed-forward block) a layer; equal numbers mean the same parameters. All else (encoder, counts,
traffic, exports) reads the plan, so that a new pattern is one row of PATTERNS. A new word of
`--per-layer` is a row of ADDITIONS here and its module in BUILD of `model/per_layer.py`, which
describes the places; a command line reads this file and must not wait for torch.
"""

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from albert_ds.base.errors import UserError
from albert_ds.base.plugin import Table
from albert_ds.model.projections import list_places

Plan = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A word of --sharing. `plan` raises ValueError with the reason if there is none."""

    form: str  # as it is typed
    meaning: str
    plan: Callable[[str, int], Plan]  # of what follows the colon, and the number of layers
    example: str = ""  # for 6 layers, in the table, of a word with a colon
    count: Callable[[str], int] | None = None  # layers, if what follows the colon says them
    # What follows the colon at another number of layers, of the same blocks.
    resize: Callable[[str, int], str] = lambda value, num_layers: value


@contextmanager
def _read(sharing: str) -> Generator[tuple[Pattern, str]]:
    """The pattern of a word, and what follows its colon. A ValueError of it names the word."""
    word, colon, value = sharing.partition(":")
    pattern = PATTERNS.get(word)
    if pattern is None or bool(colon) != (":" in pattern.form):
        *forms, last = (known.form for known in PATTERNS.values())
        raise UserError(f"--sharing {sharing}: must be {', '.join(forms)} or {last}")
    try:
        yield pattern, value
    except ValueError as error:
        raise UserError(f"--sharing {sharing}: {error}") from None


def share(sharing: str, num_layers: int) -> Plan:
    """The attention and the feed-forward block of each layer.

    Returns one (attention index, ffn index) a layer; each kind's indices are 0 to their number - 1.
    Raises UserError for an unknown word, and if the layers cannot be divided so.
    """
    with _read(sharing) as (pattern, value):
        return pattern.plan(value, num_layers)


def count_named_layers(sharing: str) -> int | None:
    """The layers of a word that says their number, like loop:1,2x4,1; None of other words."""
    with _read(sharing) as (pattern, value):
        return pattern.count(value) if pattern.count else None


def resize(sharing: str, num_layers: int) -> str:
    """The same pattern's word for another number of layers; UserError if there is none."""
    with _read(sharing) as (pattern, value):
        return sharing.removesuffix(value) + pattern.resize(value, num_layers)


def find_layers(plan: Plan, shallow: Plan) -> list[int] | None:
    """The layers of `plan` that run as `shallow`: the first of its blocks, in its order.

    None if `plan` does not have them in this order.
    """
    layers = iter(enumerate(plan))
    matches = [next((n for n, own in layers if own == blocks), None) for blocks in shallow]
    return None if None in matches else [n for n in matches if n is not None]


def find_loops(plan: Plan) -> set[int]:
    """The layers at which a loop begins: those of the blocks that others come back to."""
    heads = set()
    for layer, blocks in enumerate(plan):
        first = plan.index(blocks)
        if first < layer and (first == 0 or plan[first - 1] != plan[layer - 1]):
            heads.add(blocks)
    return {layer for layer, blocks in enumerate(plan) if blocks in heads}


def name_plan(plan: Plan) -> str:
    """The word of --sharing for a plan: the first of the table that gives it."""
    layers = len(plan)
    for word in _list_words(plan):
        try:
            if share(word, layers) == plan:
                return word
        except UserError:
            continue
    attention, ffn = (",".join(map(str, blocks)) for blocks in zip(*plan, strict=True))
    return f"pattern:{attention}" + (f"/{ffn}" if ffn != attention else "")


def _list_words(plan: Plan) -> Iterator[str]:
    """Words of so many layers, but the one that lists its blocks."""
    for pattern in PATTERNS.values():
        counts = range(2, len(plan)) if pattern.form.endswith((":N", ":M")) else [0]
        yield from (pattern.form.replace(":N", f":{n}").replace(":M", f":{n}") for n in counts)
    first, second, *others = *sorted(find_loops(plan)), 0, 0
    core = second - first
    runs = len(others)
    yield f"loop:{first},{core}x{runs},{len(plan) - first - core * runs}"


def list_patterns() -> list[tuple[str, str, str]]:
    """(word, blocks of the layers of its example, meaning) of every pattern, to print."""
    rows = []
    for pattern in PATTERNS.values():
        attention, ffn = (
            " ".join(map(str, blocks))
            for blocks in zip(*share(pattern.example or pattern.form, 6), strict=True)
        )
        blocks = attention if attention == ffn else f"{attention} / {ffn}"
        shown = f"{pattern.example}: " if pattern.example else ""
        rows.append((pattern.form, shown + blocks, pattern.meaning))
    return rows


def _alike(blocks: list[int]) -> Plan:
    return list(zip(blocks, blocks, strict=True))


def _count(value: str, num_layers: int) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= num_layers):
        raise ValueError(f"{value!r} must be a whole number from 1 to --num-layers {num_layers}")
    return int(value)


def _groups(value: str, num_layers: int) -> Plan:
    count = _count(value, num_layers)
    if num_layers % count:
        raise ValueError(f"{count} does not divide --num-layers {num_layers}")
    return _alike([layer * count // num_layers for layer in range(num_layers)])


def _cycle(value: str, num_layers: int) -> Plan:
    count = _count(value, num_layers)
    return _alike([layer % count for layer in range(num_layers)])


def _cycle_rev(value: str, num_layers: int) -> Plan:
    count = _count(value, num_layers)
    turned = max(count, count * (-(-num_layers // count) - 1))  # from here on backwards
    places = [layer % count for layer in range(num_layers)]
    return _alike([p if n < turned else count - 1 - p for n, p in enumerate(places)])


def _read_loop(value: str) -> tuple[int, int, int, int]:
    """Layers of their own before, blocks of the core, its runs, layers of their own after."""
    typed = re.fullmatch(r"([0-9]+),([1-9][0-9]*)x([1-9][0-9]*),([0-9]+)", value)
    if typed is None:
        raise ValueError(f"{value!r} must be P,CxR,D: layers, blocks x runs, layers")
    before, core, runs, after = map(int, typed.groups())
    return before, core, runs, after


def _loop(value: str, num_layers: int) -> Plan:
    before, core, runs, after = _read_loop(value)
    if before + core * runs + after != num_layers:
        raise ValueError(f"is {before + core * runs + after} layers, --num-layers is {num_layers}")
    ends = before + core
    looped = [*range(before, ends)] * runs
    return _alike([*range(before), *looped, *range(ends, ends + after)])


def _count_loop(value: str) -> int:
    before, core, runs, after = _read_loop(value)
    return before + core * runs + after


def _resize_loop(value: str, num_layers: int) -> str:
    before, core, _, after = _read_loop(value)
    if num_layers - before - after not in range(core, num_layers + 1, core):
        raise ValueError(f"has {before} + {core} x R + {after} layers, R at least 1")
    return f"{before},{core}x{(num_layers - before - after) // core},{after}"


def _pattern(value: str, num_layers: int) -> Plan:
    halves = []
    for half in value.split("/"):
        words = half.split(",")
        if not all(word.isascii() and word.isdecimal() for word in words):
            raise ValueError(f"{half!r} must be block numbers with commas between them")
        blocks = [int(word) for word in words]
        if len(blocks) != num_layers:
            raise ValueError(f"names {len(blocks)} blocks for --num-layers {num_layers}")
        if {*blocks} != {*range(len({*blocks}))}:
            raise ValueError(f"{half!r} must number its blocks from 0 on, and leave none out")
        halves.append(blocks)
    if len(halves) > 2:
        raise ValueError("must have one half, or two: attention/feed-forward")
    return list(zip(halves[0], halves[-1], strict=True))


PATTERNS = Table(Pattern) | {
    "all": Pattern(
        "all", "one block for all layers (ALBERT)", lambda _, layers: _alike([0] * layers)
    ),
    "attention": Pattern(
        "attention",
        "one attention block; each layer its own feed-forward block",
        lambda _, layers: [(0, layer) for layer in range(layers)],
    ),
    "ffn": Pattern(
        "ffn",
        "one feed-forward block; each layer its own attention block",
        lambda _, layers: [(layer, 0) for layer in range(layers)],
    ),
    "none": Pattern(
        "none", "each layer its own block (BERT)", lambda _, layers: _alike([*range(layers)])
    ),
    "groups": Pattern(
        "groups:N", "N groups of neighbours (Takase and Kiyono's SEQUENCE)", _groups, "groups:2"
    ),
    "cycle": Pattern("cycle:M", "M blocks in turn (CYCLE)", _cycle, "cycle:2"),
    "cycle-rev": Pattern(
        "cycle-rev:M",
        "M blocks in turn, the last time backwards (CYCLE REV)",
        _cycle_rev,
        "cycle-rev:2",
    ),
    "loop": Pattern(
        "loop:P,CxR,D",
        "P layers of their own, C blocks run R times, D layers of their own",
        _loop,
        "loop:1,2x2,1",
        count=_count_loop,
        resize=_resize_loop,
    ),
    "pattern": Pattern(
        "pattern:BLOCKS",
        "the blocks of the layers, or attention/feed-forward",
        _pattern,
        "pattern:0,1,2,2,1,0/0,0,0,1,1,1",
        count=lambda value: len(value.split("/")[0].split(",")),
    ),
}


@dataclass(frozen=True, slots=True)
class Addition:
    """A word of --per-layer."""

    form: str  # as it is typed
    meaning: str
    places: tuple[str, ...]  # of each layer, where its module stands
    begins_loops: bool = False  # only the layers at which a loop begins have it


ADDITIONS = Table(Addition) | {
    "norm": Addition("norm", "its own LayerNorms", ("attention.layer_norm", "ffn.layer_norm")),
    "scale": Addition(
        "scale", "a factor on the result of each of its blocks", ("attention.result", "ffn.result")
    ),
    "position": Addition(
        "position", "a vector, the embedding of its number, added to its input", ("layer.input",)
    ),
    "inject": Addition(
        "inject",
        "a factor on the embedding's output and a vector, added where a loop begins",
        ("layer.embedded",),
        begins_loops=True,
    ),
    "lora": Addition(
        "lora:R", "a product of rank R added to each of its six projections", list_places()
    ),
}
MAX_RANK = 1 << 16


def read_additions(per_layer: str) -> dict[str, int]:
    """The words of a comma list, each with the number after its colon, else 0.

    Raises UserError for a wrong word.
    """
    additions: dict[str, int] = {}
    for typed in per_layer.split(",") if per_layer != "none" else []:
        word, colon, value = typed.partition(":")
        known = ADDITIONS.get(word)
        is_number = value.isascii() and value.isdecimal() and 1 <= int(value) <= MAX_RANK
        if known is None or bool(colon) != (":" in known.form) or (colon and not is_number):
            forms = ", ".join(addition.form for addition in ADDITIONS.values())
            raise UserError(
                f"--per-layer {per_layer}: {typed!r} must be one of {forms}, R at most {MAX_RANK}"
            )
        if word in additions:
            raise UserError(f"--per-layer {per_layer}: names {word} twice")
        additions[word] = int(value or 0)
    return additions
