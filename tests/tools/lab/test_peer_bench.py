"""Both sides compute one loss; the peer's rows are those sequences, padded and nothing else."""

import json
import subprocess
import sys

import torch

from tests.batches import IGNORED, concatenate, pad, random_samples
from tests.conftest import ROOT
from tools.lab.peer_bench import OURS, as_table, pad_batch


def test_every_peer_begins_at_our_loss(tmp_path):
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-W", "ignore", "tools/lab/peer_bench.py", "--model", "albert-tiny"),
        *("--micro-batch-size", "2", "--sequence-length", "64", "--dropout", "0"),
        *("--peers", "sdpa", "eager", "--warmup", "0", "--rounds", "2"),
        *("--output", report),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(report.read_text())
    ours = found["first_losses"].pop(OURS)
    assert found["first_losses"].keys() == {"sdpa", "eager"}
    for loss in found["first_losses"].values():
        assert abs(loss - ours) < 1e-5 * ours
    for name in ("rounds", "cpu_rounds"):
        assert [list(times) for times in found[name]] == [[OURS, "sdpa", "eager"]] * 2
        assert all(seconds > 0 for times in found[name] for seconds in times.values())
    assert len(found["loads"]) == 2 and found["product_seconds"] > 0
    assert found["fill"] == 1.0 and "(its best)" in done.stdout


def test_disturbed_rounds_count_by_their_cpu_seconds_alone():
    wall = [{OURS: 1.0, "sdpa": 2.0, "eager": 3.0}, {OURS: 1.0, "sdpa": 2.0, "eager": 1.9}]
    cpu = [{OURS: 2.0, "sdpa": 4.0, "eager": 6.0}, {OURS: 2.0, "sdpa": 2.0, "eager": 3.6}]
    report = {"rounds": wall, "cpu_rounds": cpu, "threads": 2, "loads": [0.5, 7.0], "fill": 1.0}
    report |= {"first_losses": wall[0], "first_seconds": wall[0], "product_seconds": 2.0}
    report |= {"settings": {"model": "m", "micro_batch_size": "4", "deepspeed_config": "ds.json"}}
    said = as_table({**report, "device": "cpu"})  # sdpa had half of its threads' time
    assert "2 rounds, of which 1 disturbed" in said and "load 0.5 .. 7.0" in said
    assert "| sdpa (its best) | 2.00 | 2.00 | 2.00 | 2.00 | 1.50 | 3.00 |" in said
    assert "| eager | 3.00 | 3.00 | 3.00 | 3.00 | 2.40 | 4.80 |" in said
    said = as_table({**report, "device": "cpu", "threads": 3})
    assert "of which 2 disturbed" in said and "| - | - | - | - | 2.40 | 4.80 |" in said
    said = as_table({**report, "device": "cuda"})  # its host waits
    assert "of which 0 disturbed" in said and "| sdpa (its best) | 2.00 |" in said


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
