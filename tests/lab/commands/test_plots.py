"""Every picture is drawn from the files that other commands write, small, and refused otherwise."""

import json
import re
from xml.etree import ElementTree

import pytest
from albert_lab import plots
from albert_lab.commands.plots import main
from PIL import Image

from albert_ds.base.errors import UserError
from tests.conftest import ROOT

REPORT = ROOT / "docs/raw/bench_base_2.json"
LIMIT = 100_000  # bytes of a picture
SVG = "{http://www.w3.org/2000/svg}"


def plot(*flags) -> None:
    main([str(flag) for flag in flags])


def write_run(folder, *records) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_curves_and_how_far_runs_are_apart(tmp_path, capsys):
    """A chart for each loss and score that is there; places are those of the values."""
    for name, shift in (("one", 0.0), ("two", 0.25)):
        write_run(
            tmp_path / name / "run",
            {"step": 10, "loss": 9.7, "mlm_loss": 9.0 + shift, "sop_loss": 0.7, "lr": 1e-3},
            {"step": 10, "heldout_mlm_loss": 9.1},
            {"step": 20, "loss": 8.7, "mlm_loss": 8.0, "sop_loss": None, "lr": 1e-3},
        )
    write_run(tmp_path / "tuned", {"step": 1, "loss": 0.6}, {"step": 2, "dev_f1": 0.5})
    picture = tmp_path / "curves.svg"
    runs = [tmp_path / "one/run", tmp_path / "two/run", tmp_path / "tuned"]
    plot("curves", "--runs", *runs, "--output", picture)
    assert picture.stat().st_size < LIMIT
    root = ElementTree.parse(picture).getroot()
    titles = [text.text for text in root.iter(f"{SVG}tspan") if text.get("class") == "title"]
    assert titles == ["Loss", "MLM loss", "SOP loss", "Loss", "Dev f1"]
    names = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "run"]
    assert names == ["A one", "B two", "C tuned"]
    sop = root.findall(f"{SVG}g")[2]  # nothing is held out yet: lines of training, no marker
    drawn = [path.get("class").split()[0] for path in sop.iter(f"{SVG}path") if path.get("class")]
    assert "line" in drawn and "mark" not in drawn
    mlm = root.findall(f"{SVG}g")[1]
    lines = [p.get("d") for p in mlm.iter(f"{SVG}path") if "line s" in (p.get("class") or "")]
    (x0, one), (x1, end), (_, two), (_, same) = (
        map(float, place) for d in lines for place in re.findall(r"[ML]([\d.]+),([\d.]+)", d)
        if d.count(",") == 2
    )  # fmt: skip
    assert x0 < x1 and two < one < end == same  # y goes down
    said = capsys.readouterr().out
    assert "two against one: mlm_loss differs by 0.25 at most (logged steps in common: 2)" in said
    assert "two against one: sop_loss differs by 0 at most (logged steps in common: 1)" in said
    assert "tuned against one: loss is not compared (logged steps in common: 0)" in said


def test_depths_have_intervals_and_whole_ticks(tmp_path):
    """Of few depths too, and as in the report; a PNG has the ink of the SVG's words."""
    keys = ("mlm_loss", "mlm_accuracy", "l2", "degrees")
    rows = [
        {"num_layers": depth, **dict.fromkeys(keys, 1.0 / depth)}
        | {f"{key}_interval": 0.1 for key in keys}
        for depth in (3, 4, 5)
    ]
    (tmp_path / "depths.json").write_text(json.dumps({"depths": rows}))
    for kind in ("svg", "png"):
        plot("depths", "--input", tmp_path / "depths.json", "--output", tmp_path / f"a.{kind}")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    titles = [text.text for text in root.iter(f"{SVG}tspan") if text.get("class") == "title"]
    assert titles == ["MLM loss", "MLM accuracy", "L2 distance", "Angle"]
    for chart in root.findall(f"{SVG}g"):
        (across,) = (g for g in chart.iter(f"{SVG}g") if g.get("class") == "ticks x")
        assert [text.text for text in across] == ["3", "4", "5", "layers that run"]
        (strokes,) = (p for p in chart.iter(f"{SVG}path") if "whisker" in p.get("class", ""))
        heights = re.findall(r"M[\d.]+,([\d.]+)V([\d.]+)", strokes.get("d"))
        lengths = [float(low) - float(high) for low, high in heights]
        assert len(lengths) == 3 and lengths == pytest.approx([lengths[0]] * 3, abs=0.2)
    drawn = Image.open(tmp_path / "a.png").convert("L").crop((0, 20, 500, 60))
    assert drawn.getextrema()[0] < 128  # the line of words above the charts


def test_the_parts_of_the_baselines_step_are_one_step(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, output: figures.append(figure))
    cells = plots.read_cells(REPORT)
    plots.draw_split(cells, tmp_path / "split.png")
    (axis,) = figures[0].axes
    ends = [bar.get_x() + bar.get_width() for bar in axis.containers[-1]]
    assert len(ends) == len(cells)
    of_baseline = sum(cell["model"] == "bert-base" for cell in cells)
    assert sum(end == pytest.approx(1, abs=0.01) for end in ends) == of_baseline


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer_seconds": None}, "rounds.0.optimizer_seconds null: must be a number"),
        ({"kinds": {"gradients": 3}}, "kinds: gradients 3: must be an object"),
        ({"kinds": {"gradients": {}}}, 'kinds: no "gradients.wire_bytes" in it'),
    ],
)
def test_a_report_without_what_is_drawn_is_refused(changes, said, tmp_path):
    report = json.loads(REPORT.read_text())
    file = tmp_path / "report.json"
    report["cells"][0]["rounds"][0] |= changes
    file.write_text(json.dumps(report))
    with pytest.raises(UserError, match=re.escape(said)):
        plot("split", "--input", file, "--output", tmp_path / "split.png")


def test_cells_of_two_configurations_are_told_apart(tmp_path, monkeypatch):
    """Of one stage and precision: all are drawn, each over its own configuration's baseline."""
    figures = []
    file = tmp_path / "report.json"
    monkeypatch.setattr(plots, "save", lambda figure, output: figures.append(figure))
    report = json.loads(REPORT.read_text())
    lamb = [report["cells"][0], report["cells"][3]]  # bert-base, albert-base in one layout
    muon = json.loads(json.dumps(lamb))
    for cell in muon:
        cell["deepspeed_config"] = "ds_configs/zero1_fp32_muon.json"
        for turn in cell["rounds"]:
            turn |= {key: 3 * turn[key] for key in turn if "seconds" in key}
    file.write_text(json.dumps({**report, "cells": lamb + muon}))
    for kind in ("traffic", "split"):
        plot(kind, "--input", file, "--output", tmp_path / f"{kind}.png")
        names = [text.get_text() for text in figures[-1].axes[0].get_yticklabels()]
        assert sorted(names) == [
            f"{size}, zero1_fp32{more}"
            for size in ("albert-base", "bert-base")
            for more in ("", "_muon")
        ]
    ends = [bar.get_x() + bar.get_width() for bar in figures[-1].axes[0].containers[-1]]
    assert [end == pytest.approx(1, abs=0.01) for end in ends] == [True, False, True, False]


def test_wrong_input_is_one_line(tmp_path):
    write_run(tmp_path / "run", {"step": 1})
    damaged = tmp_path / "layers.json"
    damaged.write_text(json.dumps({"models": {"albert": {"l2": [1.0]}}}))
    svg, run = tmp_path / "picture.svg", tmp_path / "run"
    for flags, output, says in (
        (("split", "--input", REPORT, "--only", "ranks=9"), "picture.png", "ranks=9"),
        (("traffic", "--input", "absent.json"), "picture.png", "absent.json"),
        (("layers", "--input", damaged), "picture.png", "albert"),
        (("curves", "--runs", "absent"), svg, "absent"),
        (("curves", "--runs", run), svg, "no loss and no accuracy is recorded yet"),
        (("curves", "--runs", run), "a.pdf", "a.pdf: must be a name that ends in .svg or .png"),
        (("split", "--input", REPORT), "a.jpg", "a.jpg: must be a name that ends in"),
        (
            ("curves", "--runs", run, run, "--labels", "a", "a"),
            svg,
            "--labels a a: must be 2 different names",
        ),
        (("curves", "--runs", run, "--labels", "a", "a"), svg, "a a: must be 1 different names"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            plot(*flags, "--output", tmp_path / output)
        assert "\n" not in str(caught.value) and not (tmp_path / output).exists(), flags


def write_check(path, *cells) -> None:
    """What gpu-check writes, with records that are no steps: (micro, rows, median ms, kernels)."""
    records = [{"kind": "machine"}, {"kind": "speed", "size": "albert-base", "error": "no memory"}]
    for micro, rows, ms, kernels in cells:
        times = dict(step_seconds=ms / 1e3, fastest=ms / 2e3, slowest=ms / 5e2)
        profile = {"profile": {"kernel_us": 1e3 * kernels}} if kernels else {}
        about = {"kind": "speed", "size": "albert-base", "micro": micro, "checkpointing": "none"}
        records.append({**about, "rows": rows, "found": times | profile})
        records.append({**records[-1], "kernels_from": 0, "found": {}})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_steps_of_two_checks_lie_side_by_side(tmp_path, monkeypatch):
    figures = []
    files = [tmp_path / f"{name}.jsonl" for name in ("one", "two")]
    monkeypatch.setattr(plots, "save", lambda figure, output: figures.append(figure))
    write_check(files[0], (64, "random", 110, 99), (8, "random", 68, None))
    write_check(files[1], (64, "random", 100, 90), (64, "text", 112, 77))
    flags = ("--input", *files, "--output", tmp_path / "steps.png", "--labels")
    plot("steps", *flags, "before", "after")
    (axis,) = figures[0].axes
    names = [text.get_text() for text in axis.get_yticklabels()]
    assert names == ["albert-base, 8", "albert-base, 64", "albert-base, 64, text"]
    drawn = {line.get_label(): [*map(float, line.get_xdata())] for line in axis.lines}
    assert drawn == {
        "before: median, range": [110, 68],
        "before: its kernels": [99],
        "after: median, range": [100, 112],
        "after: its kernels": [90, 77],
    }
    ranges = [[*path.vertices[:, 0]] for path in axis.collections[1].get_paths()]
    assert ranges == [[50, 200], [56, 224]]
    graphs = {
        "kind": "graph speed",
        "micro": 64,
        "rows": "text",
        "found": {"step_ms": 80, "p90_ms": 90, "by_graph": 1},
    }
    lines = (json.dumps(graphs | {"by": by}) + "\n" for by in ("graphs", "eager"))
    files[1].write_text("".join(lines))
    plot("steps", *flags, "before", "after")
    (axis,) = figures[1].axes
    assert [[*path.vertices[:, 0]] for path in axis.collections[1].get_paths()] == [[80, 90]]
    assert "albert-base, 64, text" in [text.get_text() for text in axis.get_yticklabels()]
    for labels, said in ((("one",), "must be 2 names"), (("a", "a"), "must be 2 names")):
        with pytest.raises(UserError, match=said):
            plot("steps", *flags, *labels)
    files[1].write_text('{"kind": "machine"}\n')
    with pytest.raises(UserError, match="two.jsonl, .*: has no record of `speed` or"):
        plot("steps", *flags, "before", "after")


def test_the_pages_picture_of_steps_is_drawn_from_the_recorded_checks(tmp_path):
    files = [ROOT / f"docs/raw/gpu_h200_{number}_results.jsonl" for number in (1, 2, 3)]
    labels = ("27 November", "28 November", "with graphs")
    plot("steps", "--input", *files, "--output", tmp_path / "a.png", "--labels", *labels)
    assert (tmp_path / "a.png").stat().st_size < LIMIT
    assert (ROOT / "docs/pictures/gpu_steps.png").is_file()


def test_scores_by_the_minutes_of_training(tmp_path, monkeypatch):
    figures = []
    file = tmp_path / "scores.json"
    monkeypatch.setattr(plots, "save", lambda figure, output: figures.append(figure))
    models = [("a", 70.5, 5), ("b", 61, None), ("c", 62, 100)]
    records = [{"name": name, "score": score, "minutes": time} for name, score, time in models]
    file.write_text(json.dumps({"models": records}))
    plot("scores", "--input", file, "--output", tmp_path / "scores.svg")
    (axis,) = figures[0].axes
    points = [(*map(float, line.get_data()[0]), *line.get_data()[1]) for line in axis.lines[:2]]
    assert points == [(5, 70.5), (100, 62)] and [*axis.lines[2].get_ydata()] == [61, 61]
    assert {text.get_text() for text in axis.texts} == {"a", "b", "c"}
    file.write_text('{"models": [{"name": "a", "score": 101, "minutes": 5}]}')
    with pytest.raises(UserError, match=r"models.0.score.* 101: must be"):
        plot("scores", "--input", file, "--output", tmp_path / "scores.svg")


def test_the_pages_picture_of_scores_is_drawn_from_the_recorded_ones(tmp_path):
    file = ROOT / "docs/raw/scores_by_minutes.json"
    plot("scores", "--input", file, "--output", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size < LIMIT
    assert (ROOT / "docs/pictures/scores.svg").is_file()
