"""Markdown tables, the statistics that stand in them, and the reports they are made of."""

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from albert_ds.base.cli import Range, integer
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import check, read_json

# Parts of a step, and their titles in tables and pictures.
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "communication": "exposed communication",
    "optimizer": "optimizer",
    "data_wait": "waiting for data",
    "other": "other",
}
SECONDS = {part: f"{part}_seconds" for part in PARTS}  # their names in a report
FIGURE = re.compile(r"-?|[-+]?[\d.,]+(e[-+]?\d+)?( ?%|x)?( \(.*\))?")

_COUNT = integer(1, 1 << 32)
_SECONDS = Range(ge=0)
_ROUND = {
    "seconds_a_step": Range(gt=0),
    **dict.fromkeys(SECONDS.values(), _SECONDS),
    "kinds": dict,
}
_CELL = {
    "model": str,
    "ranks": _COUNT,
    "deepspeed_config": str,
    "zero": (0, 1, 2, 3),
    "tensor_parallel": _COUNT,
    "micro_batch_size": _COUNT,
    "accumulation": _COUNT,
    "sequence_length": _COUNT,
    "precision": ("fp32", "bf16", "fp16"),
    "activation_checkpointing": ("none", "attention", "block"),
    "rounds": [_ROUND],
}


def read_report(path: Path) -> dict:
    """A report that `albert-ds bench --output` wrote; UserError where it is none."""
    name = f"--input {path}, a report of `albert-ds bench`"
    report = read_json(path, name)
    check(report, {"cells": [_CELL]}, name)
    if not report["cells"] or not all(cell["rounds"] for cell in report["cells"]):
        raise UserError(f"{name}: must have measured cells")
    for kinds in (turn["kinds"] for cell in report["cells"] for turn in cell["rounds"]):
        check(kinds, dict.fromkeys(kinds, {"wire_bytes": Range(ge=0)}), f"{name}: kinds")
    return report


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. Columns whose cells are all figures, "-" or empty are aligned right."""
    lines = [[str(cell) for cell in row] for row in rows]
    columns = zip(*lines, strict=True) if lines else [() for _ in header]
    rule = ["---:" if all(map(FIGURE.fullmatch, column)) else "---" for column in columns]
    cells = [
        "".join(f" {cell} |" if cell else " |" for cell in row) for row in [header, rule, *lines]
    ]
    return "\n".join(f"|{row}" for row in cells)


def count_steps(records: Iterable[dict]) -> list[tuple[dict, int]]:
    """The records of logging intervals, each with the number of its steps."""
    logged = [record for record in records if "step_seconds" in record]
    starts = [0, *(record["step"] for record in logged)]
    return [(r, r["step"] - start) for r, start in zip(logged, starts, strict=False)]


def three(values: Sequence[float], form: str = ".2f") -> list[str]:
    """Minimum, median and maximum, formatted."""
    return [format(f(values), form) for f in (min, statistics.median, max)]


def spread(values: Sequence[float], form: str = ",.3g") -> str:
    """`median (minimum .. maximum)`; a single value as it is."""
    low, middle, high = three(values, form)
    return middle if len(values) == 1 else f"{middle} ({low} .. {high})"
