"""The two commands: what they leave behind, and how they end on bad input."""

import gzip
import os

from albert_ds.data import shards
from albert_ds.data.shards import read_index
from tests.command import run_command
from tests.data.corpus import make_documents, write_wiki

VOCAB, SHARDS = "vocab", "shards"


def test_both_tools_leave_what_they_promise(tmp_path):
    write_wiki(tmp_path / os.fsdecode(b"wiki\xff"), make_documents(60))  # no UTF-8
    corpus = tmp_path / "wiki*"
    done = run_command(VOCAB, "--input", corpus, "--output", tmp_path / "v", "--vocab-size", 200)
    assert (done.code, done.err) == (0, "")
    names = {path.name for path in (tmp_path / "v").iterdir()}
    tokenizer = {"tokenizer_config.json", "tokenizer.json"}
    assert names == {"spiece.model", "spiece.vocab", *tokenizer}
    pieces = (tmp_path / "v" / "spiece.vocab").read_text(encoding="utf-8").splitlines()
    assert [
        line.split("\t")[0] for line in pieces[:6]
    ] == "<pad> <unk> [CLS] [SEP] [MASK] (".split()
    assert len(pieces) == 200

    model = tmp_path / "v" / "spiece.model"
    data = tmp_path / "d"
    argv = ["--input", corpus, "--vocab", model, "--output", data, "--sequence-length", 32]
    done = run_command(SHARDS, *argv, "--holdout", 0.1, "--samples-per-shard", 50)
    assert done.code == 0, done.err
    assert done.err.count("\n") == 2 and "have one sentence and so no pair" in done.err
    assert "are held out; of their 154 masked ones an accuracy has a standard error" in done.err
    index = read_index(data)
    assert [file["name"] for file in index["input"]] == ["wiki?"]
    listed = [s["name"] for entry in index["splits"].values() for s in entry["shards"]]
    assert {"train-000000.tar", "train-000001.tar", "heldout-000000.tar"} <= set(listed)
    others = {"index.json", "spiece.model", *tokenizer}
    assert {path.name for path in data.iterdir()} == set(listed) | others
    assert (data / "spiece.model").read_bytes() == model.read_bytes()
    assert index["sequence_length"] == 32 and index["vocab_size"] == 200
    # A folder that holds a data set is never written to.
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    done = run_command(SHARDS, *argv)
    assert done.code == 2 and "holds a built data set already" in done.err
    assert {path.name: path.read_bytes() for path in data.iterdir()} == before


def test_a_shard_that_no_reader_takes_is_refused(tmp_path, vocab, monkeypatch):
    vocab.write(tmp_path)
    write_wiki(tmp_path / "wiki", make_documents(60))
    argv = ["--input", tmp_path / "wiki", "--vocab", tmp_path / "spiece.model"]
    argv += ["--output", tmp_path / "d", "--sequence-length", 32, "--holdout", 0.1]
    monkeypatch.setattr(shards, "MAX_SHARD_BYTES", 1 << 16)
    done = run_command(SHARDS, *argv)
    assert done.code == 2 and not list(tmp_path.rglob("*.tar"))
    assert "--samples-per-shard: train-000000.tar would have " in done.err
    assert "bytes; at most 65,536: fewer sequences in a shard" in done.err
    assert run_command(SHARDS, *argv, "--samples-per-shard", 32).code == 0


def bad_inputs(tmp_path, model):
    """Arguments, exit code and what the line says, of each tool."""
    text, empty, cut = tmp_path / "text", tmp_path / "empty", tmp_path / "cut.gz"
    text.write_text("Some text. And more.\n")
    empty.write_text("\n\n")
    (tmp_path / "nothing").mkdir()
    cut.write_bytes(gzip.compress(b"Some text.\n" * 9999)[:-9])
    output = tmp_path / "out"
    for source, code, words in [
        (tmp_path / "absent", 2, "absent: matches no file"),
        (f"{tmp_path}/*.absent", 2, "*.absent: matches no file"),
        (tmp_path / "nothing", 2, "nothing: matches no file"),
        (empty, 2, "the files hold no text"),
        (cut, 3, "cut.gz: cannot be read after line"),
    ]:
        yield VOCAB, ["--input", source, "--output", output], code, words
        yield SHARDS, ["--input", source, "--vocab", model, "--output", output], code, words
    given = ["--input", text, "--output", output]
    yield VOCAB, [*given, "--vocab-size", 20], 2, "--vocab-size 20: this text has"
    for command, more in ((VOCAB, []), (SHARDS, ["--vocab", model])):
        for place, words in ((text, "text: is the input"), (empty, "exists and is not a folder")):
            yield command, ["--input", text, "--output", place, *more], 2, words
    yield SHARDS, [*given, "--vocab", tmp_path / "no.model"], 2, "no.model: no such file"
    yield SHARDS, [*given, "--vocab", text], 2, "text: not a SentencePiece model"
    given += ["--vocab", model]
    yield SHARDS, [*given, "--holdout", 2], 2, "--holdout 2: must be at least 0"
    yield SHARDS, [*given, "--text-field", "\udcff"], 2, r"--text-field '\udcff': must be UTF-8"


def test_bad_input_is_one_line_and_writes_nothing(tmp_path, vocab):
    (tmp_path / "vocab").mkdir()
    vocab.write(tmp_path / "vocab")
    for command, argv, code, words in bad_inputs(tmp_path, tmp_path / "vocab" / "spiece.model"):
        done = run_command(command, *argv)
        assert done.code == code and done.err.count("\n") == 1 and words in done.err, (argv, done)
        assert not (tmp_path / "out").exists()
