"""The measured rows -> Markdown."""

import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from albert_lab.tables import table

from tests.exactness.modes import FACTORS, Mode, same_order
from tests.exactness.run import Difference, Outcome, References, compare, tensor_errors

FIGURES = ("loss", "gradient", "parameters", "key bias")
HEAD = ("ZeRO", "TP", "DP", "precision", "accumulation", "clipping", "checkpointing", "sharing")
HEAD += ("own", "objective", "resumed", *FIGURES)
BF16_FIGURES = ("loss", "gradient", "parameters, worst tensor", "all tensors together")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A mode and its difference from the float64 reference."""

    mode: Mode
    off: Difference


def measure_rows(outcomes: dict[Mode, Outcome]) -> list[Row]:
    references = References()
    return [
        Row(mode=mode, off=compare(outcome, references.of(mode, outcome)))
        for mode, outcome in outcomes.items()
    ]


def layout_table(rows: list[Row], *, has_refused: bool) -> str:
    """A row for each mode; `has_refused`: also for those that the configuration check refuses."""
    lines = []
    for mode, off in ((row.mode, row.off) for row in rows):
        clipping = "off" if mode.clipping is None else mode.clipping
        cells = [mode.stage, *mode.grid, mode.precision, mode.accumulation, clipping]
        cells += [mode.checkpointing, mode.sharing, mode.per_layer, mode.objective]
        lines.append([*cells, "yes" if mode.resumed else "no", *_worst([off])])
    for grid in FACTORS["grid"] if has_refused else ():
        lines.append([0, *grid, "bf16", *["any"] * 7, *["refused"] * 4])
    return table(HEAD, lines)


def _worst(differences: list[Difference], last: str = "key_bias") -> list[str]:
    names = ("loss", "gradient", "parameter", last)
    return [f"{max(getattr(off, name) for off in differences):.1e}" for name in names]


def describe_machine() -> list[str]:
    """Where and when the tables of a page were measured."""
    from albert_ds.process.world import name_device

    today = datetime.now(UTC).strftime("%-d %B %Y")
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    about = f"{name_device()}, torch {torch.__version__}"
    return [f"Measured on {today}, commit {commit}: {about}.", ""]


def worst_table(rows: list[Row]) -> str:
    """The worst figures of each precision, and the number of modes."""
    lines = []
    for precision in FACTORS["precision"]:
        differences = [row.off for row in rows if row.mode.precision == precision]
        lines.append([precision, len(differences), *_worst(differences)])
    return table(("precision", "modes", *FIGURES), lines)


def grid_table(rows: list[Row]) -> str:
    """The worst tensor in fp32, all tensors together in bf16, by stage and grid."""
    cells: dict[tuple, dict] = {}
    for row in rows:
        mode = row.mode
        key = (mode.sharing, mode.per_layer, mode.precision, mode.stage)
        error = row.off.parameter if mode.precision == "fp32" else row.off.overall
        cells.setdefault(key, {})[mode.grid] = f"{error:.1e}"
    names = [f"TP {tp}, DP {dp}" for tp, dp in FACTORS["grid"]]
    lines = [[*key, *(errors[grid] for grid in FACTORS["grid"])] for key, errors in cells.items()]
    return table(("sharing", "own", "precision", "ZeRO", *names), lines)


def depth_table(rows: list[Row]) -> str:
    """The rows of `depth_modes`."""
    head = ("ZeRO", "TP", "DP", "sharing", "own", "layers of each step", "exits", "resumed")
    lines = []
    for mode, off in ((row.mode, row.off) for row in rows):
        layers = ", ".join(map(str, mode.depths))
        cells = [mode.stage, *mode.grid, mode.sharing, mode.per_layer]
        cells.append(f"{layers}, drawn from {mode.drawn}" if mode.drawn else layers)
        cells.append(", ".join(f"{layer}:{weight}" for layer, weight in mode.exits) or "none")
        lines.append([*cells, "yes" if mode.resumed else "no", *_worst([off])])
    return table((*head, *FIGURES), lines)


def half_precision_table(outcomes: dict[Mode, Outcome], kind: str = "bf16") -> str:
    """The error of a precision itself, and the difference that each kind of layout adds to it."""
    references = References()
    half = [m for m in outcomes if m.precision == kind and same_order(m) in outcomes]
    own = [m for m in half if m.grid == (1, 1)]

    def added(chosen: list[Mode]) -> list[Difference]:
        return [compare(outcomes[m], outcomes[same_order(m)]) for m in chosen]

    described = (
        ("float64 from bf16 weights", [references.spread(m, outcomes[m]) for m in own]),
        (
            f"{kind}, one process, against float64",
            [compare(outcomes[m], references.of(m, outcomes[m])) for m in own],
        ),
        (
            f"{kind}, every layout, against float64",
            [compare(outcomes[m], references.of(m, outcomes[m])) for m in half],
        ),
        (
            "added by data parallelism and ZeRO",
            added([m for m in half if m.tensor_parallel == 1 and m.data_parallel > 1]),
        ),
        ("added by tensor parallelism 2", added([m for m in half if m.tensor_parallel == 2])),
        ("added by tensor parallelism 4", added([m for m in half if m.tensor_parallel == 4])),
    )
    lines = [[what, len(pairs), *_worst(pairs, "overall")] for what, pairs in described if pairs]
    return table(("compared", "pairs", *BF16_FIGURES), lines)


def tensor_table(outcomes: dict[Mode, Outcome]) -> str:
    """Tensor by tensor, in bf16: its error in one process, and what tensor parallelism adds."""
    cut = [Mode(grid=(size, 1), precision="bf16") for size in (2, 4)]
    alone = same_order(cut[0])
    exact = References().of(alone, outcomes[alone])
    own = tensor_errors(outcomes[alone], exact)
    added = [tensor_errors(outcomes[mode], outcomes[alone]) for mode in cut]
    far = [tensor_errors(outcomes[mode], exact) for mode in cut]
    head = ("tensor", "one process against float64", "TP 2", "TP 4", "TP 2 against one process")
    columns = (own, *far, *added)
    lines = [[name, *(f"{column[name]:.1e}" for column in columns)] for name in own]
    return table((*head, "TP 4"), lines)


def size_table() -> str:
    """One step of LAMB on one tensor of real size against float64, on this CPU."""
    from tests.optim.test_real_sizes import PIECES, SHAPES, measure_norm, measure_update

    lines = []
    for shape in SHAPES:
        figures = [*measure_update(shape).values(), measure_norm(shape)]
        lines.append([f"{shape[0]} x {shape[1]}", *(f"{value:.1e}" for value in figures)])
    return table(("tensor", *(f"{pieces} pieces" for pieces in PIECES), "norm"), lines)
