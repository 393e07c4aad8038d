"""What a person is shown of a set is what training draws from it."""

import re
import subprocess
import sys

from albert_ds.data.samples import StreamConfig
from albert_ds.data.shards import open_shards
from albert_ds.data.stream import training_batches
from tests.conftest import ROOT


def inspect(data, *flags):
    command = [sys.executable, "tools/inspect_shards.py", "--data", str(data), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_samples_and_counts_are_those_of_training(data, tmp_path):
    count, picture = 48, tmp_path / "picture.png"
    length = open_shards(data, "train").sequence_length
    done = inspect(
        *(data, "--count", str(count), "--show", "2", "--picture", str(picture)),
        *("--sequence-length", str(length), "--seed", "7"),
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    source = open_shards(data, "train")
    batch = next(
        training_batches(
            [source],
            None,
            StreamConfig(sequence_length=length, seed=7),
            start=0,
            batch_size=count,
            micro_batch_size=count,
            dp_rank=0,
            dp_size=1,
        )
    )
    tokens, masked = batch.tokens, batch.masked
    assert f"{count} samples, {tokens:,} tokens" in done.stdout
    assert f"masked: {masked / tokens:.2%} of the tokens" in done.stdout
    swapped = sum(label == 1 for label in batch.tensors["pair_labels"].tolist())
    assert f"pairs with label 1: {swapped / batch.pairs:.1%}" in done.stdout
    # The text of the first sample, put back together, is what is stored.
    first = done.stdout.split("sample 1:")[0]
    shown = "".join(re.findall(r"^  [AB]: (.*)$", first, re.M))
    text = re.sub(r"\{(.+?)(=>.+?)?\}", r"\1", shown).replace("[CLS]", "").replace("[SEP]", "")
    ids = batch.tensors["input_ids"].clone()
    ids[batch.tensors["masked_positions"]] = batch.tensors["masked_labels"]
    mine = ids[: int(batch.tensors["cu_seqlens"][1])].tolist()
    expected = "".join(source.vocab.pieces[i] for i in mine if i > 3)
    assert re.sub(r"[\s\u2581]", "", text) == expected.replace("\u2581", "")


def test_wrong_input_is_one_line_and_code_2(data, tmp_path):
    for flags, words in (
        ((tmp_path,), "no index.json here"),
        ((data, "--count", "0"), "--count"),
        ((data, "--sequence-length", "4096"), "--sequence-length 4096"),
    ):
        done = inspect(*flags)
        assert done.returncode == 2 and words in done.stderr
        assert done.stderr.count("\n") == 1
