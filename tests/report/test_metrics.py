"""Means are over the counted items; a resume cuts the metrics file back."""

import json

import pytest
import torch

from albert_ds.parallel.consensus import Counts
from albert_ds.report.metrics import cut_back, peak_flops, summarise


def test_means_are_over_counted_positions_and_pairs():
    outputs = torch.tensor([30.0, 5.0, 6.0, 3.0])
    values = summarise(outputs, Counts(masked=10, pairs=4), "sop")
    assert values == pytest.approx(
        {"loss": 4.5, "mlm_loss": 3.0, "mlm_accuracy": 0.5, "sop_loss": 1.5, "sop_accuracy": 0.75}
    )


def test_without_a_pair_there_is_no_pair_accuracy_and_the_loss_is_the_other_one():
    values = summarise(torch.tensor([30.0, 5.0, 0.0, 0.0]), Counts(masked=10), "nsp")
    assert values["nsp_accuracy"] is None and values["loss"] == 3.0
    assert "sop_loss" not in summarise(torch.zeros(4), Counts(masked=1), "none")


def test_lines_after_the_resumed_step_and_half_lines_go(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    path.write_text("\n".join([*lines, '{"step": 4, "lo']))
    cut_back(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


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
    found = peak_flops(torch.device("cuda"))
    assert found == (teraflops * 1e12 if teraflops else None)
