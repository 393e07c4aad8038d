"""The fit finds the constants that made the data, and knows how far off it is on what it has not
seen: a whole model, a whole link speed, a whole number of ranks."""

import json

import pytest
from albert_lab.scaling.fit import (
    START,
    check,
    divide,
    fit_machine,
    read_cells,
    read_hold_out,
    summarise,
)

from albert_ds.errors import UserError
from tests.lab.scaling.bench import MACHINE, make_report, write_report

HELD = "model=albert-large,link=100mbit,ranks=4,model=albert-base"


def fit(path):
    rest, groups = divide(read_cells(path), read_hold_out(HELD))
    machine = fit_machine(rest, name="fitted", source="test")
    return machine, {name: summarise(check(group, machine)) for name, group in groups.items()}


def test_known_constants_are_recovered(tmp_path):
    machine, held = fit(write_report(tmp_path / "bench.json"))
    for name in START:
        assert getattr(machine, name) == pytest.approx(getattr(MACHINE, name), rel=0.02), name
    assert list(held) == HELD.split(",")
    for found in held.values():
        assert found["cells"] > 0 and found["largest"] < 0.01


def test_noise_is_tolerated(tmp_path):
    _, held = fit(write_report(tmp_path / "bench.json", noise=0.05))
    for found in held.values():
        assert found["mean"] < 0.04 and found["largest"] < 0.1


def test_what_is_held_back_is_not_fitted(tmp_path):
    """Cells of the model held back are spoilt: the constants stay, and the error shows it."""
    report = make_report()
    for cell in report["cells"]:
        if cell["model"] == "albert-large":
            for turn in cell["rounds"]:
                for key in ("forward_seconds", "backward_seconds", "seconds_a_step"):
                    turn[key] *= 3
    (tmp_path / "bench.json").write_text(json.dumps(report))
    machine, held = fit(tmp_path / "bench.json")
    assert machine.a_flop == pytest.approx(MACHINE.a_flop, rel=0.02)
    assert held["model=albert-large"]["mean"] > 0.3


@pytest.mark.parametrize(
    ("hold_out", "says"),
    [
        ("speed=1", "speed"),
        ("model=", "model"),
        ("model=bert-xlarge", "no cell"),
        ("micro_batch_size=2", "every cell"),
    ],
)
def test_wrong_hold_out_is_named(tmp_path, hold_out, says):
    cells = read_cells(write_report(tmp_path / "bench.json"))
    with pytest.raises(UserError, match=says):
        divide(cells, read_hold_out(hold_out))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda report: report.pop("cells"), "throughput_bench"),
        (lambda report: report["cells"][3].pop("zero"), "cells.3.zero"),
        (lambda report: report["cells"][3].update(parameters=7), "cell 3.*parameters"),
        (lambda report: report["cells"][3].update(model="gpt"), "cell 3.*gpt"),
    ],
)
def test_what_is_no_report_is_named(tmp_path, spoil, says):
    report = make_report()
    spoil(report)
    (tmp_path / "bench.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match=says):
        read_cells(tmp_path / "bench.json")
