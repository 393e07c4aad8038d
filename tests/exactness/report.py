"""The measured rows -> Markdown."""

import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.exactness.modes import FACTORS, Mode, same_order
from tests.exactness.run import Difference, Outcome, References, compare, tensor_errors

HEAD = (
    "| ZeRO | TP | DP | precision | accumulation | clipping | checkpointing | sharing | own "
    "| objective | resumed | loss | gradient | parameters | key bias |",
    "| --- " * 11 + "| --: " * 4 + "|",
)


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


def as_table(rows: list[Row]) -> list[str]:
    return [*HEAD, *(_as_line(row.mode, _figures(row.off)) for row in rows)]


def refused_lines() -> list[str]:
    """The modes that the configuration check refuses."""
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
        mode.per_layer,
        mode.objective,
        "yes" if mode.resumed else "no",
    )
    cells = [mode.stage, *mode.grid, mode.precision, *(anything or value for value in rest)]
    return "| " + " | ".join(map(str, [*cells, *figures])) + " |"


def _figures(off: Difference) -> list[str]:
    return [f"{value:.1e}" for value in (off.loss, off.gradient, off.parameter, off.key_bias)]


def describe_machine() -> list[str]:
    """Where and when the tables of a page were measured."""
    from albert_ds.process.world import name_device

    today = datetime.now(UTC).strftime("%-d %B %Y")
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return [f"Measured on {today}, commit {commit}: {name_device()}, torch {torch.__version__}."]


def worst_table(rows: list[Row]) -> list[str]:
    """The worst figures of each precision, and the number of modes."""
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


def muon_table(rows: list[Row]) -> list[str]:
    """The worst tensor in fp32, all tensors together in bf16, by stage and grid."""
    grids = FACTORS["grid"]
    found: dict[tuple, dict] = {}
    for row in rows:
        mode = row.mode
        key = (mode.sharing, mode.per_layer, mode.precision, mode.stage)
        error = row.off.parameter if mode.precision == "fp32" else row.off.overall
        found.setdefault(key, {})[mode.grid] = f"{error:.1e}"
    names = [f"TP {tp}, DP {dp}" for tp, dp in grids]
    lines = [
        f"| sharing | own | precision | ZeRO | {' | '.join(names)} |",
        "| --- " * 4 + "| --: " * len(grids) + "|",
    ]
    for key, errors in found.items():
        cells = [*key, *(errors[grid] for grid in grids)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def depth_table(rows: list[Row]) -> list[str]:
    """The rows of `depth_modes`."""
    lines = [
        "| ZeRO | TP | DP | sharing | own | layers of each step | exits | resumed "
        "| loss | gradient | parameters | key bias |",
        "| --- " * 8 + "| --: " * 4 + "|",
    ]
    for mode, off in ((row.mode, row.off) for row in rows):
        layers = ", ".join(map(str, mode.depths))
        cells = [mode.stage, *mode.grid, mode.sharing, mode.per_layer]
        cells.append(f"{layers}, drawn from {mode.drawn}" if mode.drawn else layers)
        cells.append(", ".join(f"{layer}:{weight}" for layer, weight in mode.exits) or "none")
        cells += ["yes" if mode.resumed else "no", *_figures(off)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def half_precision_table(outcomes: dict[Mode, Outcome]) -> list[str]:
    """The error of bf16 itself, and the difference that each kind of layout adds to it."""
    references = References()
    half = [m for m in outcomes if m.precision == "bf16" and same_order(m) in outcomes]
    own = [m for m in half if m.grid == (1, 1)]

    def added(chosen: list[Mode]) -> list[Difference]:
        return [compare(outcomes[m], outcomes[same_order(m)]) for m in chosen]

    described = (
        ("float64 from bf16 weights", [references.spread(m, outcomes[m]) for m in own]),
        (
            "bf16, one process, against float64",
            [compare(outcomes[m], references.of(m, outcomes[m])) for m in own],
        ),
        (
            "bf16, every layout, against float64",
            [compare(outcomes[m], references.of(m, outcomes[m])) for m in half],
        ),
        (
            "added by data parallelism and ZeRO",
            added([m for m in half if m.tensor_parallel == 1 and m.data_parallel > 1]),
        ),
        ("added by tensor parallelism 2", added([m for m in half if m.tensor_parallel == 2])),
        ("added by tensor parallelism 4", added([m for m in half if m.tensor_parallel == 4])),
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
    return lines


def tensor_table(outcomes: dict[Mode, Outcome]) -> list[str]:
    """Tensor by tensor, in bf16: its error in one process, and what tensor parallelism adds."""
    cut = [Mode(grid=(size, 1), precision="bf16") for size in (2, 4)]
    alone = same_order(cut[0])
    exact = References().of(alone, outcomes[alone])
    own = tensor_errors(outcomes[alone], exact)
    added = [tensor_errors(outcomes[mode], outcomes[alone]) for mode in cut]
    far = [tensor_errors(outcomes[mode], exact) for mode in cut]
    lines = [
        "| tensor | one process against float64 | TP 2 | TP 4 | TP 2 against one process | TP 4 |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name, error in own.items():
        figures = [error, *(column[name] for column in (*far, *added))]
        lines.append(f"| {name} | " + " | ".join(f"{value:.1e}" for value in figures) + " |")
    return lines


def size_table() -> list[str]:
    """One step of LAMB on one tensor of real size against float64, on this CPU."""
    from tests.optim.test_real_sizes import PIECES, SHAPES, measure_norm, measure_update

    lines = [
        "| tensor | " + " | ".join(f"{pieces} pieces" for pieces in PIECES) + " | norm |",
        "| --- " + "| --: " * (len(PIECES) + 1) + "|",
    ]
    for shape in SHAPES:
        figures = [*measure_update(shape).values(), measure_norm(shape)]
        cells = [f"{shape[0]} x {shape[1]}", *(f"{value:.1e}" for value in figures)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
