"""Constants of a machine from measured steps, and how far off they are on steps held back.

Least squares on relative errors, of every part of a step in shares of the whole step and of the
whole step itself, over the logarithms of the constants (none can be negative).
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from albert_ds.errors import UserError
from albert_ds.scaling.cells import KEYS, Cell
from albert_ds.scaling.predict import Machine, StepTime, predict_step
from albert_ds.scaling.traffic import GRADIENTS, WEIGHTS

# Where the search starts, per constant: a core at 20 GFLOP/s, memory at some GB/s.
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
LINK_COSTS = ("link_cost", "link_cost_gather")  # at least 1: no link is faster than it is
SMALLEST = 1e-16  # below this a constant is as good as 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A measured cell beside what the constants say of it."""

    cell: Cell
    predicted: StepTime

    @property
    def error(self) -> float:
        """Relative, of the whole step: above 0 where too much is predicted."""
        return self.predicted.total / self.cell.total - 1


def fit_machine(cells: list[Cell], *, name: str, source: str) -> Machine:
    """The constants nearest to the cells. Raises UserError where there are too few of them."""
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


def compare(cell: Cell, machine: Machine) -> list[float]:
    """Errors of the parts and of the whole, in shares of the measured step."""
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


def check(cells: Iterable[Cell], machine: Machine) -> list[Check]:
    return [
        Check(
            cell=cell,
            predicted=predict_step(cell.layout, machine, link=cell.link, devices=cell.devices),
        )
        for cell in cells
    ]


def read_hold_out(text: str) -> list[tuple[str, str]]:
    """`model=albert-large,link=100mbit,ranks=4` -> what is held back. Raises UserError."""
    pairs = [part.partition("=") for part in text.split(",")]
    for key, _, value in pairs:
        if key not in KEYS or not value:
            raise UserError(
                f"--hold-out {text}: {key!r}; allowed: KEY=VALUE,... of {', '.join(KEYS)}"
            )
    return [(key, value) for key, _, value in pairs]


def divide(
    cells: list[Cell], held: list[tuple[str, str]]
) -> tuple[list[Cell], dict[str, list[Cell]]]:
    """Cells to fit, and those held back by each key: a whole model, a whole link, a whole count.

    Raises UserError for a key that holds nothing back, and where nothing is left to fit.
    """
    groups = {
        f"{key}={value}": [cell for cell in cells if cell.keys[key] == value] for key, value in held
    }
    for name, group in groups.items():
        if not group:
            raise UserError(f"--hold-out {name}: no cell of the input is like that")
    rest = [cell for cell in cells if not any(cell in group for group in groups.values())]
    if not rest:
        raise UserError("--hold-out: holds every cell back; something must be left to fit")
    return rest, groups


def summarise(checks: list[Check]) -> dict[str, float]:
    """Mean, median and largest of the errors' sizes."""
    errors = [abs(found.error) for found in checks]
    return {
        "cells": len(errors),
        "mean": statistics.mean(errors),
        "median": statistics.median(errors),
        "largest": max(errors),
    }
