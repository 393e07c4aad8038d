"""Every picture is drawn from the JSON that the other tools write, small, and refused otherwise."""

import json

import pytest
from albert_lab.commands import plots
from albert_lab.plots import bench
from albert_lab.plots.lines import list_curves

from albert_ds.errors import UserError
from tests.conftest import ROOT

REPORT = ROOT / "docs/raw/bench_base_2.json"
LIMIT = 100_000  # bytes of a picture


def plot(*flags) -> None:
    plots.main([str(flag) for flag in flags])


def assert_picture(path):
    drawn = path.read_bytes()
    assert drawn.startswith(b"\x89PNG") and 3000 < len(drawn) < LIMIT


@pytest.mark.parametrize("command", ["traffic", "split"])
def test_measured_cells(tmp_path, command):
    picture, only = tmp_path / "picture.png", ("--only", "micro_batch_size=1,ranks=2")
    plot(command, "--input", REPORT, *only, "--output", picture)
    assert_picture(picture)


def test_layers(tmp_path):
    values = {"sharing": "all", "l2": [3.0, 2.0, 2.5], "degrees": [40.0, 20.0, 15.0], "tokens": 9}
    report, picture = tmp_path / "layers.json", tmp_path / "layers.png"
    report.write_text(json.dumps({"models": {"albert": values, "bert": values}}))
    plot("layers", "--input", report, "--output", picture)
    assert_picture(picture)
    report.write_text(json.dumps({"models": {"albert": {"l2": [1.0]}}}))
    with pytest.raises(UserError, match="albert"):
        plot("layers", "--input", report, "--output", picture)


def test_curves_and_how_far_runs_are_apart(tmp_path, capsys):
    for name, shift in (("one", 0.0), ("two", 0.25)):
        (tmp_path / name).mkdir()
        records = [
            {"step": 10, "mlm_loss": 9.0 + shift, "mlm_accuracy": 0.1, "sop_loss": 0.7},
            {"step": 10, "heldout_mlm_loss": 9.1, "heldout_mlm_accuracy": 0.1},
            {"step": 20, "mlm_loss": 8.0, "mlm_accuracy": 0.2, "sop_loss": None},
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    picture = tmp_path / "curves.png"
    runs = (tmp_path / "one", tmp_path / "two")
    plot("curves", "--runs", *runs, "--output", picture)
    assert_picture(picture)
    said = "two against one: mlm_loss differs by 0.25 at most (logged steps in common: 2)"
    assert said in capsys.readouterr().out


def test_panels_are_those_of_the_keys_that_are_there():
    shared = {"step", "loss", "lr"}
    assert [c.key for c in list_curves(shared | {"dev_accuracy", "dev_f1"})] == [
        "loss",
        "dev_accuracy",
        "dev_f1",
    ]
    nsp = shared | {"mlm_loss", "nsp_loss", "heldout_mlm_loss"}
    assert [c.key for c in list_curves(nsp)] == ["mlm_loss", "nsp_loss"]
    assert not list_curves({"step"})


def test_two_folders_called_run_are_named_by_what_differs(tmp_path, capsys):
    runs = [tmp_path / name / "run" for name in ("dropout", "none")]
    for run in runs:
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "dev_accuracy": 0.5}\n')
    plot("curves", "--runs", *runs, "--output", tmp_path / "curves.png")
    assert_picture(tmp_path / "curves.png")
    said = "none against dropout: dev_accuracy differs by 0 at most (logged steps in common: 1)"
    assert said in capsys.readouterr().out


def test_the_parts_of_the_baselines_step_are_one_step(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(bench, "save", lambda figure, output: figures.append(figure))
    cells = bench.read_cells(REPORT)
    bench.draw_split(cells, tmp_path / "split.png")
    (axis,) = figures[0].axes
    ends = [bar.get_x() + bar.get_width() for bar in axis.containers[-1]]
    assert len(ends) == len(cells)
    of_baseline = sum(cell["model"] == "bert-base" for cell in cells)
    assert sum(end == pytest.approx(1, abs=0.01) for end in ends) == of_baseline


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("split", "--only", "ranks=9"), "ranks=9"),
        (("traffic", "--input", "absent.json"), "absent.json"),
        (("curves", "--runs", "absent"), "absent"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, flags, says):
    given = list(flags)
    if flags[0] != "curves" and "--input" not in flags:
        given += ["--input", str(REPORT)]
    with pytest.raises(UserError, match=says) as found:
        plots.main([*given, "--output", str(tmp_path / "picture.png")])
    assert "\n" not in str(found.value)
    assert not (tmp_path / "picture.png").exists()
