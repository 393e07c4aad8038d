"""The measured rows -> Markdown."""

import statistics
from dataclasses import dataclass

from tests.exactness.modes import FACTORS, Mode, yardstick
from tests.exactness.run import Difference, Outcome, References, compare

HEAD = (
    "| ZeRO | TP | DP | precision | accumulation | clipping | checkpointing | sharing | objective "
    "| loss | gradient | parameters | key bias |",
    "| --- " * 9 + "| --: " * 4 + "|",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A mode and how far it is from its float64 reference."""

    mode: Mode
    off: Difference


def measure_rows(outcomes: dict[Mode, Outcome]) -> list[Row]:
    references = References()
    return [
        Row(mode=mode, off=compare(outcome, references.of(mode, outcome)))
        for mode, outcome in outcomes.items()
    ]


def as_table(rows: list[Row]) -> list[str]:
    return [*HEAD, *(_as_line(row.mode, _figures(row.off)) for row in rows)]


def refused_lines() -> list[str]:
    """The modes that end with code 2 before anything runs."""
    return [
        _as_line(Mode(grid=grid, stage=0, precision="bf16"), ["refused"] * 4, anything="any")
        for grid in FACTORS["grid"]
    ]


def _as_line(mode: Mode, figures: list[str], anything: str = "") -> str:
    rest = (
        mode.accumulation,
        "off" if mode.clipping is None else mode.clipping,
        mode.checkpointing,
        mode.sharing,
        mode.objective,
    )
    cells = [mode.stage, *mode.grid, mode.precision, *(anything or value for value in rest)]
    return "| " + " | ".join(map(str, [*cells, *figures])) + " |"


def _figures(off: Difference) -> list[str]:
    return [f"{value:.1e}" for value in (off.loss, off.gradient, off.parameter, off.key_bias)]


def worst_table(rows: list[Row]) -> list[str]:
    """The worst figures of each precision, and how many modes they are of."""
    lines = [
        "| precision | modes | loss | gradient | parameters | key bias |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for precision in FACTORS["precision"]:
        found = [row.off for row in rows if row.mode.precision == precision]
        figures = [
            max(getattr(off, name) for off in found)
            for name in ("loss", "gradient", "parameter", "key_bias")
        ]
        cells = [precision, len(found), *(f"{value:.1e}" for value in figures)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def half_precision_table(outcomes: dict[Mode, Outcome], rows: list[Row]) -> list[str]:
    """What bf16 costs by itself, what a layout adds, and how far layouts are from each other."""
    off = {row.mode: row.off for row in rows}
    half = [m for m in outcomes if m.precision == "bf16" and yardstick(m) in outcomes]
    own = {yardstick(m): off[yardstick(m)] for m in half}
    groups = _same_cut(half)
    early = [d for group in groups for d in _spread(outcomes, [m for m in group if m.stage < 3])]
    late = [d for group in groups for d in _spread(outcomes, [m for m in group if m.stage != 2])]
    other_cut = [compare(outcomes[m], outcomes[yardstick(m)]) for m in half if m != yardstick(m)]
    described = (
        ("bf16, one process, one micro-batch, against float64", list(own.values())),
        ("every bf16 mode against float64", [off[m] for m in half]),
        ("every bf16 mode against bf16 in one process (other sums are rounded)", other_cut),
        ("ZeRO-2 against ZeRO-1, in one grid, for one cut of the batch", early),
        ("ZeRO-3 against ZeRO-1, in one grid, for one cut of the batch", late),
    )
    lines = [
        "| compared | pairs | loss | gradient | parameters, worst tensor | all tensors together |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for what, found in described:
        figures = [
            max(getattr(d, name) for d in found)
            for name in ("loss", "gradient", "parameter", "overall")
        ]
        cells = [what, len(found), *(f"{value:.1e}" for value in figures)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return [
        *lines,
        "",
        *_ratio_table({m: off[m].overall / own[yardstick(m)].overall for m in half}),
    ]


def _ratio_table(ratios: dict[Mode, float]) -> list[str]:
    """Error of a bf16 mode over that of bf16 in one process, by grid."""
    lines = [
        "| TP x DP | modes | error over that of one process: minimum | median | maximum |",
        "| --- | --: | --: | --: | --: |",
    ]
    for grid in FACTORS["grid"]:
        found = [r for m, r in ratios.items() if m.grid == grid and m != yardstick(m)]
        if found:
            figures = (min(found), statistics.median(found), max(found))
            cells = [f"{grid[0]} x {grid[1]}", len(found), *(f"{value:.2f}" for value in figures)]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _same_cut(modes: list[Mode]) -> list[list[Mode]]:
    """Modes that differ in nothing but the stage, the first of them first."""
    groups: dict[tuple, list[Mode]] = {}
    for mode in modes:
        key = (mode.grid, mode.accumulation, mode.checkpointing, mode.clipping)
        groups.setdefault((*key, mode.sharing, mode.objective), []).append(mode)
    return [sorted(group, key=lambda mode: mode.stage) for group in groups.values()]


def _spread(outcomes: dict[Mode, Outcome], group: list[Mode]) -> list[Difference]:
    first, others = group[:1], group[1:]
    return [compare(outcomes[other], outcomes[one]) for one in first for other in others]
