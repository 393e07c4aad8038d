"""Means are over the counted items; a resume cuts the metrics file back."""

import json

import pytest
import torch

from albert_ds.runtime.consensus import Counts
from albert_ds.runtime.metrics import cut_back, summarise


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
