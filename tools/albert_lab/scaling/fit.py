"""Fit a machine's constants to measured steps, and check them on steps held back from the fit.

`read_cells` reads reports of tools/throughput_bench.py. The fit is least squares on relative
errors: of each part of a step, as a share of the whole step, and of the whole step. It searches
over the logarithms of the constants, so none becomes negative.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from albert_ds.errors import UserError
from albert_ds.model.config import SIZES
from albert_ds.model.shapes import count_params
from albert_lab.scaling.collectives import GRADIENTS, WEIGHTS
from albert_lab.scaling.layout import Layout
from albert_lab.scaling.step_time import Machine, StepTime, predict_step
from albert_lab.tables import read_report

# Keys of a cell in the report by which --hold-out can select cells.
KEYS = (
    *("model", "link", "ranks", "nodes", "zero", "tensor_parallel", "micro_batch_size"),
    "sequence_length",
)
# Start of the search for each constant: a core at 20 GFLOP/s, memory at some GB/s.
START = {
    "a_flop": 5e-11,
    "an_element": 1e-9,
    "a_weight": 1e-9,
    "a_gradient": 1e-9,
    "an_update": 1e-8,
    "a_parameter": 1e-9,
    "a_step": 1e-3,
    "alpha": 1e-3,
    "beta": 1e-9,
    "beta_gather": 1e-9,
    "link_cost": 1.1,
    "link_cost_gather": 1.1,
    "straggle": 0.03,
}
LINK_COSTS = ("link_cost", "link_cost_gather")  # at least 1
SMALLEST = 1e-16  # a smaller constant is set to 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One layout on one link. Times are medians over the rounds, in seconds per step."""

    layout: Layout
    link: float | None  # bits/s of a node's link; None: no limit
    devices: float  # cores or GPUs per rank
    keys: dict[str, str]  # KEYS, as the user types them
    total: float
    compute: float  # forward and backward
    communication: float  # exposed
    optimizer: float  # with all remaining parts
    kinds: dict[str, float]  # exposed communication by kind

    @property
    def label(self) -> str:
        k = self.keys
        return (
            f"{k['model']}, {k['ranks']} ranks on {k['nodes']} nodes, link {k['link']}, "
            f"{k['micro_batch_size']} x {k['sequence_length']} tokens x {self.layout.accumulation}"
        )


def read_cells(path: Path) -> list[Measurement]:
    """Raises UserError, naming file and cell, for a file that is no report or an unknown model."""
    report = read_report(path)
    found = []
    for number, cell in enumerate(report["cells"]):
        try:
            found.append(_read_cell(cell, report.get("cores")))
        except (KeyError, TypeError) as error:
            raise UserError(f"--input {path}, cell {number}: not as measured: {error!r}") from None
        except UserError as error:
            raise UserError(f"--input {path}, cell {number}: {error}") from None
    return found


def _read_cell(cell: dict, cores: int | None) -> Measurement:
    if cell["model"] not in SIZES:
        raise UserError(f"model {cell['model']}; allowed: {', '.join(SIZES)}")
    model = SIZES[cell["model"]]
    expected = sum(count_params(model).values())
    if cell["parameters"] != expected:
        raise UserError(
            f"{cell['model']} with {cell['parameters']:,} parameters, not the {expected:,} of the "
            "size; only unchanged sizes can be predicted"
        )
    layout = Layout(
        name=cell["model"],
        model=model,
        ranks=cell["ranks"],
        nodes=cell["nodes"],
        zero=cell["zero"],
        tensor_parallel=cell["tensor_parallel"],
        micro_batch_size=cell["micro_batch_size"],
        accumulation=cell["accumulation"],
        sequence_length=cell["sequence_length"],
        precision=cell["precision"],
        activation_checkpointing=cell["activation_checkpointing"],
    )
    rounds = cell["rounds"]

    def median(*names: str) -> float:
        return statistics.median(sum(turn[f"{n}_seconds"] for n in names) for turn in rounds)

    def median_of_kind(kind: str) -> float:
        return statistics.median(turn["kinds"][kind]["exposed_seconds"] for turn in rounds)

    total = statistics.median(turn["seconds_a_step"] for turn in rounds)
    compute, communication = median("forward", "backward"), median("communication")
    return Measurement(
        layout=layout,
        link=cell["link_bits_per_second"],
        devices=cores / layout.ranks if cores else 1.0,
        keys={key: str(cell[key]) if cell[key] is not None else "none" for key in KEYS},
        total=total,
        compute=compute,
        communication=communication,
        optimizer=median("optimizer", "data_wait", "other"),
        kinds={kind: median_of_kind(kind) for kind in rounds[0]["kinds"]},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A measured cell and its predicted step."""

    cell: Measurement
    predicted: StepTime

    @property
    def error(self) -> float:
        """Relative error of the whole step; above 0 where the prediction is too long."""
        return self.predicted.total / self.cell.total - 1


def fit_machine(cells: list[Measurement], *, name: str, source: str) -> Machine:
    """The constants that fit the cells best. Raises UserError if no cell has several ranks."""
    import numpy as np
    from scipy.optimize import least_squares

    names = [n for n in START if n not in LINK_COSTS or any(c.link for c in cells)]
    if not any(cell.layout.ranks > 1 for cell in cells):
        raise UserError("--input: no cell has more than one rank; communication cannot be fitted")

    def machine(logarithms) -> Machine:
        values = {
            n: float(v) if v > SMALLEST else 0.0
            for n, v in zip(names, np.exp(logarithms), strict=True)
        }
        return Machine(name=name, source=source, **values)

    def residuals(logarithms):
        built = machine(logarithms)
        return np.concatenate([compare(cell, built) for cell in cells])

    start = np.log([START[n] for n in names])
    low = np.log([1.0 if n in LINK_COSTS else SMALLEST / 10 for n in names])
    high = np.full(len(names), np.log(10.0))
    found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return machine(found.x)


def compare(cell: Measurement, machine: Machine) -> list[float]:
    """Errors of the parts and of the whole, as shares of the measured step."""
    step = predict_step(cell.layout, machine, link=cell.link, devices=cell.devices)
    kinds = [
        (step.kinds[kind] - cell.kinds[kind]) / cell.total
        for kind in (GRADIENTS, WEIGHTS)
        if kind in cell.kinds
    ]
    return [
        *kinds,
        (step.compute - cell.compute) / cell.total,
        (step.communication - cell.communication) / cell.total,
        (step.optimizer + step.other - cell.optimizer) / cell.total,
        (step.total - cell.total) / cell.total,
    ]


def check(cells: Iterable[Measurement], machine: Machine) -> list[Check]:
    return [
        Check(
            cell=cell,
            predicted=predict_step(cell.layout, machine, link=cell.link, devices=cell.devices),
        )
        for cell in cells
    ]


def read_hold_out(text: str) -> list[tuple[str, str]]:
    """`model=albert-large,link=100mbit` -> pairs of key and value. Raises UserError."""
    pairs = [part.partition("=") for part in text.split(",")]
    for key, _, value in pairs:
        if key not in KEYS or not value:
            raise UserError(
                f"--hold-out {text}: {key!r}; allowed: KEY=VALUE,... of {', '.join(KEYS)}"
            )
    return [(key, value) for key, _, value in pairs]


def divide(
    cells: list[Measurement], held: list[tuple[str, str]]
) -> tuple[list[Measurement], dict[str, list[Measurement]]]:
    """The cells to fit, and the cells that each pair holds back.

    Raises UserError for a pair that no cell has, and where no cell is left to fit.
    """
    groups = {
        f"{key}={value}": [cell for cell in cells if cell.keys[key] == value] for key, value in held
    }
    for name, group in groups.items():
        if not group:
            raise UserError(f"--hold-out {name}: no cell of the input has this value")
    rest = [cell for cell in cells if not any(cell in group for group in groups.values())]
    if not rest:
        raise UserError("--hold-out: holds back every cell; some must be left to fit")
    return rest, groups


def summarise(checks: list[Check]) -> dict[str, float]:
    """Number of cells; mean, median and largest absolute error."""
    errors = [abs(found.error) for found in checks]
    return {
        "cells": len(errors),
        "mean": statistics.mean(errors),
        "median": statistics.median(errors),
        "largest": max(errors),
    }
