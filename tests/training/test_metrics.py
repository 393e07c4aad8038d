"""Means are over the counted items; a resume cuts the metrics file back; copies may fail."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from albert_ds.model.config import SIZES
from albert_ds.parallel.consensus import Counts
from albert_ds.training import metrics as module
from albert_ds.training.metrics import Metrics, Window, cut_back, peak_flops, summarise


def test_means_are_over_counted_positions_and_pairs():
    outputs = torch.tensor([30.0, 5.0, 6.0, 3.0, 0.0, 0.0, 0.0])
    values = summarise(outputs, Counts(masked=10, pairs=4), "sop")
    sop = {"sop_loss": 1.5, "sop_accuracy": 0.75}
    assert values == pytest.approx({"loss": 4.5, "mlm_loss": 3.0, "mlm_accuracy": 0.5, **sop})
    outputs[4:] = torch.tensor([20.0, 1.0, 5.0])
    more = summarise(outputs, Counts(masked=10, pairs=4), "sop")
    others = {"exit_loss": 2.0, "z_loss": 0.1, "teacher_loss": 0.5}
    assert more == pytest.approx({**values, **others, "loss": 7.1})


def test_without_a_pair_there_is_no_pair_accuracy_and_the_loss_is_the_other_one():
    values = summarise(torch.tensor([30.0, 5.0, *[0.0] * 5]), Counts(masked=10), "nsp")
    assert values["nsp_accuracy"] is None and values["loss"] == 3.0
    assert "sop_loss" not in summarise(torch.zeros(7), Counts(masked=1), "none")


def test_nine_of_ten_steps_are_within_the_time_that_a_line_gives(monkeypatch):
    """Evaluation and saving are not in it."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.dist, "all_reduce", lambda *_, **__: None)
    window = Window(torch.device("cpu"))
    mesh = SimpleNamespace(dp_group=None, world_size=1)
    for steps, expected in ([1, 1, 1, 9, 1, 1, 2, 1, 1, 1], 2), ([3], 3), ([1, 5], 5):
        for seconds in steps:
            now[0] += seconds
            window.add_step(Counts(samples=1), SIZES["albert-tiny"], heads=1, applied=True)
            with window.paused():
                now[0] += 100
        values = window.close(mesh, "none")  # ty: ignore
        assert values["step_seconds_p90"] == expected
        assert values["step_seconds"] == sum(steps) / len(steps)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-PCIE-16GB", 112),
        ("NVIDIA L4", None),
    ],
)
def test_a_card_has_its_own_peak(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = peak_flops(torch.device("cuda"))
    assert peak == (teraflops * 1e12 if teraflops else None)


@pytest.fixture
def open_metrics():
    """Makes the metrics of rank 0, and closes them after the test."""
    opened = []

    def open_one(run: Path, step: int = 0) -> Metrics:
        cut_back(run, step)
        opened.append(Metrics(run, SimpleNamespace(rank=0), step, num_steps=9))  # ty: ignore
        return opened[-1]

    yield open_one
    for metrics in opened:
        metrics.close()


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def scalars_of(run: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_shows_what_was_written_and_not_what_is_written_again(open_metrics, tmp_path):
    metrics = open_metrics(tmp_path)
    for step in (1, 2, 3):
        metrics.write(step, {"loss": step / 2, "none": None})
    resumed = open_metrics(tmp_path, 1)
    resumed.write(2, {"loss": 8.0})
    resumed.close()
    assert steps_of(tmp_path) == [1, 2]
    assert scalars_of(tmp_path, "loss") == [(1, 0.5), (2, 8.0)]


@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_a_board_without_its_folder_is_one_line_and_no_end(open_metrics, tmp_path, kind, capsys):
    taken = tmp_path / "tensorboard"
    taken.write_text("a note") if kind == "file" else taken.symlink_to(tmp_path / "nothing")
    metrics = open_metrics(tmp_path)
    metrics.write(1, {"loss": 1.0})
    metrics.close()
    assert steps_of(tmp_path) == [1]
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "TensorBoard failed" in line and str(taken) in line


def test_metrics_that_cannot_be_written_are_named(open_metrics, tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = open_metrics(tmp_path)
    with pytest.raises(OSError, match="No space left") as caught:
        metrics.write(1, {"loss": 1.0})
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")


def test_a_link_to_the_metrics_is_read_and_its_target_stays(open_metrics, tmp_path):
    target = tmp_path / "elsewhere"
    target.write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "metrics.jsonl").symlink_to(target)
    open_metrics(tmp_path, 1).write(2, {"loss": 1.0})
    assert steps_of(tmp_path) == [1, 2]
    assert target.read_text() == '{"step": 1}\n{"step": 2}\n'
