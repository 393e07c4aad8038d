"""The tools of tools/lab: the benches of optimizers and of peers, and the kills of chaos."""

import json
from dataclasses import replace

import pytest
import torch
from albert_lab.measurement import synthetic_batches
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from albert_ds.data.stream_config import StreamConfig
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import SIZES, count_flops
from albert_ds.optim.adam import decay_groups
from albert_ds.optim.lamb import Lamb
from albert_ds.parallel.consensus import Counts
from tests.batches import IGNORED, concatenate, pad, random_samples
from tests.command import run_python
from tools.lab.lamb_bench import build_optimizers, main
from tools.lab.peer_bench import OURS, as_table, count_spared, pad_batch


def test_all_take_every_step(tmp_path, capsys):
    report = tmp_path / "report.json"
    argv = ["--models", "albert-tiny", "--rounds", "3", "--output", str(report)]
    assert main(argv) == 0
    timings = json.loads(report.read_text())["albert-tiny"]
    kinds = ("LAMB", "Muon", "AdamW, fused")
    assert {kind: len(seconds) for kind, seconds in timings.items()} == dict.fromkeys(kinds, 3)
    shown = capsys.readouterr().out
    assert "| albert-tiny | LAMB |" in shown and "| albert-tiny | Muon |" in shown


def test_what_is_timed_is_the_whole_update():
    flat = build_optimizers("albert-tiny", torch.device("cpu"))["LAMB"]
    whole = Lamb(decay_groups(AlbertForPretraining(SIZES["albert-tiny"]).named_parameters(), 0.01))
    for flat_group, group in zip(flat.param_groups, whole.param_groups, strict=True):
        sizes = [p.numel() for p in group["params"]]
        parts = flat_group["params"][0].grad.split(sizes)
        for parameter, part in zip(group["params"], parts, strict=True):
            parameter.grad = part.view_as(parameter)
    flat.step()
    whole.step()
    for flat_group, group in zip(flat.param_groups, whole.param_groups, strict=True):
        expected = torch.cat([p.detach().flatten() for p in group["params"]])
        torch.testing.assert_close(flat_group["params"][0].detach(), expected, rtol=1e-6, atol=1e-8)


def test_every_peer_begins_at_our_loss(tmp_path):
    report = tmp_path / "report.json"
    done = run_python(
        *("-W", "ignore", "tools/lab/peer_bench.py", "--model", "albert-tiny", "--output", report),
        *("--micro-batch-size", "2", "--sequence-length", "64", "--dropout", "0"),
        *("--peers", "sdpa", "eager", "--warmup", "0", "--rounds", "2"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads(report.read_text())
    our_loss = record["first_losses"].pop(OURS)
    assert record["first_losses"].keys() == {"sdpa", "eager"}
    for loss in record["first_losses"].values():
        assert abs(loss - our_loss) < 1e-5 * our_loss
    for name in ("rounds", "cpu_rounds"):
        assert [list(times) for times in record[name]] == [[OURS, "sdpa", "eager"]] * 2
        assert all(seconds > 0 for times in record[name] for seconds in times.values())
    assert len(record["loads"]) == 2 and record["product_seconds"] > 0
    assert record["fill"] == 1.0 and "(its best)" in done.stdout


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


def test_the_bound_has_no_product_that_a_step_leaves_out():
    model = AlbertForPretraining(replace(SIZES["albert-tiny"], dropout=0.0))
    settings = {"vocab_size": model.config.vocab_size, "micro_batch_size": 2, "seed": 0}
    batch = next(synthetic_batches(StreamConfig(sequence_length=64), **settings))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**batch.tensors)
    counts = Counts.of(batch)
    h = model.config.hidden_size
    sizes = {name: getattr(counts, name) for name in ("tokens", "squared_lengths", "masked")}
    bound = count_flops(model.config, **sizes) - count_spared(model.config, counts)
    pooler_and_pairs = 2 * counts.samples * (h * h + 2 * h)
    assert bound == 3 * (counter.get_total_flops() - pooler_and_pairs)


def test_rows_hold_the_sequences_and_nothing_else():
    samples = random_samples(3, vocab_size=50, max_length=20, seed=1)
    batch, expected = concatenate(samples), pad(samples)
    for row in (None, 32):
        padded = pad_batch(batch, row)
        longest = expected["input_ids"].shape[1]
        assert padded["input_ids"].shape == (3, row or longest)
        for name in ("input_ids", "token_type_ids", "attention_mask", "labels"):
            assert torch.equal(padded[name][:, :longest], expected[name]), name
            rest = IGNORED if name == "labels" else 0
            assert (padded[name][:, longest:] == rest).all()
        assert torch.equal(padded["sentence_order_label"], expected["sentence_order_label"])


@pytest.mark.nightly
def test_a_killed_run_equals_one_left_alone(data, tmp_path):
    short = ("--kills", "4", "--seed", "6", "--steps", "24", "--cases", "tensor parallel")
    # Seed 6 kills while starting, stepping and saving; one rank and both.
    command = ("tools/lab/chaos.py", "--data", data, "--output", tmp_path / "runs")
    done = run_python(*command, *short)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()  # one more for each start that a busy machine made too slow
    assert len([line for line in lines if line.startswith("tensor parallel, kill ")]) == 4
    assert lines[-1].endswith(": 4 ended bit for bit")


def test_a_difference_is_seen(tmp_path):
    from tools.lab.chaos import compare

    for run, content in (("alone", b"1"), ("killed", b"1")):
        folder = tmp_path / run / "checkpoints" / "step-00000001"
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").write_bytes(content)
        (folder.parent / "latest").write_text("step-00000001\n")
    assert compare(tmp_path / "alone", tmp_path / "killed") == []
    (folder / "weights.safetensors").write_bytes(b"2")
    assert compare(tmp_path / "alone", tmp_path / "killed") == ["weights.safetensors"]
