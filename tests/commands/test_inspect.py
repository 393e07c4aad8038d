"""What a person is shown of a set is what training draws from it."""

import json
import re
import shutil
from dataclasses import asdict

from albert_ds.data.shards import open_shards
from albert_ds.data.stream import training_batches
from albert_ds.data.stream_config import DataPlan, StreamConfig
from tests.command import run_command


def test_samples_and_counts_are_those_of_training(data):
    count = 48
    source = open_shards(data, "train")
    length = source.sequence_length
    done = run_command(
        *("inspect", "--data", data, "--count", count, "--show", 2),
        *("--sequence-length", length, "--seed", 7),
    )
    assert done.code == 0, done.err
    stream = StreamConfig(sequence_length=length, seed=7)
    plan = DataPlan(batch_size=count, stream=stream)
    sizes = dict(step=0, micro_batch_size=count, dp_rank=0, dp_size=1)
    batch = next(training_batches([source], None, plan, **sizes))
    tokens = batch.tokens
    masked = batch.masked
    assert f"{count} samples, {tokens:,} tokens" in done.out
    assert f"masked: {masked / tokens:.2%} of the tokens" in done.out
    left_out = batch.unused_tokens / batch.available  # `unused_fraction` of training
    assert f"truncated by short draws: {left_out:.1%} of the stored tokens\n" in done.out
    swapped = sum(label == 1 for label in batch.tensors["pair_labels"].tolist())
    assert f"pairs with label 1: {swapped / batch.pairs:.1%}" in done.out
    # The text of the first sample, put back together, is what is stored.
    first = done.out.split("sample 1:")[0]
    shown = "".join(re.findall(r"^  [AB]: (.*)$", first, re.M))
    text = re.sub(r"=>[^}]+\}", "}", shown).replace("[CLS]", "").replace("[SEP]", "")
    ids = batch.tensors["input_ids"].clone()
    ids[batch.tensors["masked_positions"]] = batch.tensors["masked_labels"]
    sample_ids = ids[: int(batch.tensors["cu_seqlens"][1])].tolist()
    expected = "".join(source.vocab.pieces[i] for i in sample_ids if i > 3)
    braces_and_spaces = r"[{}\s\u2581]"  # the text may have braces of its own
    assert re.sub(braces_and_spaces, "", text) == re.sub(braces_and_spaces, "", expected)


def test_wrong_input_is_one_line_and_code_2(data, tmp_path):
    bare = shutil.copytree(data, tmp_path / "bare")
    index = json.loads((bare / "index.json").read_text())
    (bare / "index.json").write_text(json.dumps({**index, "text": {}}))
    for flags, words in (
        ((bare,), 'index.json: no "text.sampled_sentences" in it'),
        ((tmp_path,), "no index.json here"),
        ((data, "--count", "0"), "--count"),
        ((data, "--sequence-length", "4096"), "--sequence-length 4096"),
    ):
        done = run_command("inspect", "--data", *flags)
        assert done.code == 2 and words in done.err and done.err.count("\n") == 1
    (tmp_path / "config.json").write_text('{"task": "text", "data": "reviews"}')
    done = run_command("inspect", "--run", tmp_path, "--step", 1)
    assert done.code == 2 and "config.json is not of a pretraining run" in done.err
    for flag, value in (("--objective", "nsp"), ("--show", 1), ("--split", "heldout")):
        done = run_command("inspect", "--run", tmp_path, "--step", 1, flag, value)
        assert done.code == 2 and f"{flag}: not with --run" in done.err


def test_a_step_of_a_run_is_what_its_ranks_read(data, tmp_path):
    """Step 3 of two ranks, against the micro-batches that the trainer takes."""
    source = open_shards(data, "train")
    stream = StreamConfig(sequence_length=32, seed=5, masked_fraction=0.3)
    run = tmp_path / "run"
    run.mkdir()
    config = {"data": [str(data)], "data_weights": [1.0], "batch_size": 8, "steps": 9}
    (run / "config.json").write_text(json.dumps({**config, "stream": asdict(stream)}))
    done = run_command("inspect", "--run", run, "--step", 3)
    assert done.code == 0, done.err
    shown = re.split(r"^sample (\d+): .*$", done.out, flags=re.M)[1:]
    texts = dict(zip(map(int, shown[::2]), shown[1::2], strict=True))
    assert list(texts) == list(range(16, 24))
    plan = DataPlan(batch_size=8, stream=stream)
    for rank in range(2):
        sizes = dict(step=2, micro_batch_size=4, dp_rank=rank, dp_size=2)
        batch = next(training_batches([source], None, plan, **sizes))
        ends = batch.tensors["cu_seqlens"].tolist()
        for at, position in enumerate(batch.sample_ids):
            masked = (batch.tensors["masked_positions"] >= ends[at]) & (
                batch.tensors["masked_positions"] < ends[at + 1]
            )
            assert texts[position].count("{") == int(masked.sum())
            assert f"{ends[at + 1] - ends[at]} tokens" in texts[position]
            label = int(batch.tensors["pair_labels"][at])
            assert {0: "in order", 1: "swapped", -100: "no pair"}[label] in texts[position]
    for flags in (["--run", str(run)], ["--step", "3"], ["--run", str(run), "--data", str(data)]):
        done = run_command("inspect", *flags)
        assert done.code == 2 and "--run with --step" in done.err
    recorded = {**config, "stream": asdict(stream), "data_sha256": ["0" * 64]}
    (run / "config.json").write_text(json.dumps(recorded))
    done = run_command("inspect", "--run", run, "--step", 3)
    assert done.code == 2 and f"{data}: no longer the data of this run" in done.err
    done = run_command("inspect", "--run", run, "--step", 10)
    assert done.code == 2 and f"--step 10: {run} has 9 steps" in done.err and not done.out
