"""Which blocks each layer uses: `--sharing` (section 3.1, Table 4; Takase and Kiyono 2023).

A plan has one (attention block, feed-forward block) a layer; equal numbers mean the same
parameters. All else (encoder, counts, traffic, exports) reads the plan, so that a new pattern is
one row of PATTERNS.
"""

from collections.abc import Callable
from dataclasses import dataclass

from albert_ds.errors import UserError

Plan = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A word of --sharing. `plan` raises ValueError with the reason where there is none."""

    form: str  # as it is typed
    example: str  # for 6 layers, in the table
    meaning: str
    plan: Callable[[str, int], Plan]  # of what follows the colon, and the number of layers


def share(sharing: str, num_layers: int) -> Plan:
    """The attention and the feed-forward block of each layer.

    Returns one (attention index, ffn index) a layer; each kind's indices are 0 to their number - 1.
    Raises UserError for an unknown word, and where the layers cannot be divided so.
    """
    word, colon, value = sharing.partition(":")
    pattern = PATTERNS.get(word)
    if pattern is None or bool(colon) != (":" in pattern.form):
        *forms, last = (known.form for known in PATTERNS.values())
        raise UserError(f"--sharing {sharing}: must be {', '.join(forms)} or {last}")
    try:
        return pattern.plan(value, num_layers)
    except ValueError as error:
        raise UserError(f"--sharing {sharing}: {error}") from None


def name_plan(plan: Plan) -> str:
    """The word of --sharing for a plan: the first of the table that gives it."""
    layers = len(plan)
    for pattern in PATTERNS.values():
        counts = range(2, layers) if pattern.form.endswith((":N", ":M")) else [0]
        for word in (pattern.form.replace(":N", f":{n}").replace(":M", f":{n}") for n in counts):
            try:
                if share(word, layers) == plan:
                    return word
            except UserError:
                continue
    attention, ffn = (",".join(map(str, blocks)) for blocks in zip(*plan, strict=True))
    return f"pattern:{attention}" + (f"/{ffn}" if ffn != attention else "")


def list_patterns() -> list[tuple[str, str, str]]:
    """(word, blocks of the layers of its example, meaning) of every pattern, to print."""
    rows = []
    for pattern in PATTERNS.values():
        attention, ffn = (
            " ".join(map(str, blocks)) for blocks in zip(*share(pattern.example, 6), strict=True)
        )
        blocks = attention if attention == ffn else f"{attention} / {ffn}"
        shown = f"{pattern.example}: " if ":" in pattern.form else ""
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


PATTERNS: dict[str, Pattern] = {
    "all": Pattern(
        form="all",
        example="all",
        meaning="one block for all layers (ALBERT)",
        plan=lambda _, layers: _alike([0] * layers),
    ),
    "attention": Pattern(
        form="attention",
        example="attention",
        meaning="one attention block; each layer its own feed-forward block",
        plan=lambda _, layers: [(0, layer) for layer in range(layers)],
    ),
    "ffn": Pattern(
        form="ffn",
        example="ffn",
        meaning="one feed-forward block; each layer its own attention block",
        plan=lambda _, layers: [(layer, 0) for layer in range(layers)],
    ),
    "none": Pattern(
        form="none",
        example="none",
        meaning="each layer its own block (BERT)",
        plan=lambda _, layers: _alike([*range(layers)]),
    ),
    "groups": Pattern(
        form="groups:N",
        example="groups:2",
        meaning="N groups of neighbours (Takase and Kiyono's SEQUENCE)",
        plan=_groups,
    ),
    "cycle": Pattern(
        form="cycle:M",
        example="cycle:2",
        meaning="M blocks in turn (CYCLE)",
        plan=_cycle,
    ),
    "cycle-rev": Pattern(
        form="cycle-rev:M",
        example="cycle-rev:2",
        meaning="M blocks in turn, the last time backwards (CYCLE REV)",
        plan=_cycle_rev,
    ),
    "pattern": Pattern(
        form="pattern:BLOCKS",
        example="pattern:0,1,2,2,1,0/0,0,0,1,1,1",
        meaning="the blocks of the layers, or attention/feed-forward",
        plan=_pattern,
    ),
}
