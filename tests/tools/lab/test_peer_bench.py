"""Both sides compute one loss; the peer's rows are those sequences, padded and nothing else."""

import json
import subprocess
import sys

import pytest
import torch

from tests.batches import IGNORED, concatenate, pad, random_samples
from tests.conftest import ROOT
from tools.lab.peer_bench import COMPILED, OURS, pad_batch


@pytest.mark.nightly  # compiles
def test_every_peer_begins_at_our_loss(tmp_path):
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-W", "ignore", "tools/lab/peer_bench.py", "--model", "albert-tiny"),
        *("--micro-batch-size", "2", "--sequence-length", "64", "--dropout", "0"),
        *("--peers", "sdpa", "eager", "--compile", "--warmup", "0", "--rounds", "2"),
        *("--output", report),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(report.read_text())
    ours = found["first_losses"].pop(OURS)
    assert found["first_losses"].keys() == {COMPILED, "sdpa", "eager"}
    for loss in found["first_losses"].values():
        assert abs(loss - ours) < 1e-5 * ours
    assert [set(times) for times in found["rounds"]] == [{OURS, COMPILED, "sdpa", "eager"}] * 2
    assert found["fill"] == 1.0 and "(its best)" in done.stdout


def test_rows_hold_the_sequences_and_nothing_else():
    samples = random_samples(3, vocab_size=50, max_length=20, seed=1)
    batch, expected = concatenate(samples), pad(samples)
    for row in (None, 32):
        found = pad_batch(batch, row)
        longest = expected["input_ids"].shape[1]
        assert found["input_ids"].shape == (3, row or longest)
        for name in ("input_ids", "token_type_ids", "attention_mask", "labels"):
            assert torch.equal(found[name][:, :longest], expected[name]), name
            rest = IGNORED if name == "labels" else 0
            assert (found[name][:, longest:] == rest).all()
        assert torch.equal(found["sentence_order_label"], expected["sentence_order_label"])
