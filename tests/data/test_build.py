"""Building loses no token, counts what it drops, and gives the same bytes however it is run."""

import gzip
import json

import pytest

from albert_ds.data.build import Buckets, BuildConfig, Spilled, build_shards
from albert_ds.data.readers import Document, read_documents, split_sentences
from albert_ds.data.shards import Shard, open_shards
from albert_ds.errors import DamagedData, UserError
from tests.data.corpus import SEQUENCE_LENGTH, build, make_documents, write_wiki


def read_documents_of(folder):
    """Ids of every document, put together from all its sequences, by document number."""
    found = {}
    for split in ("train", "heldout"):
        source = open_shards(folder, split)
        for number in range(len(source.shards)):
            shard = Shard(source, number)
            for i in range(len(shard)):
                found.setdefault((split, shard[i].document), []).append(shard[i])
    return found


def content_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_no_token_is_lost(built, vocab, corpus):
    """The sentences of the shards are the encoded sentences of the corpus, each once."""
    longest = SEQUENCE_LENGTH - 3
    expected = sorted(
        tuple(ids[i : i + longest])
        for document in read_documents([corpus])
        for ids in vocab.encode(split_sentences(document.lines, "paragraph"))
        for i in range(0, len(ids), longest)
    )
    sentences = []
    for sequences in read_documents_of(built).values():
        for sequence in sequences:
            begin = 0
            for end in sequence.ends.tolist():
                sentences.append(tuple(sequence.ids[begin:end].tolist()))
                begin = end
    assert sorted(sentences) == expected


def test_sequences_are_pieces_of_the_text(built, vocab, documents):
    """Decoded, the sequences of a document are stretches of its normalised text, and all of it."""
    texts = {vocab.normalise(" ".join(document)) for document in documents}
    for sequences in read_documents_of(built).values():
        parts = [vocab.decode(sequence.ids.tolist()) for sequence in sequences]
        (text,) = [text for text in texts if all(part in text for part in parts)]
        letters = sorted("".join(parts).replace(" ", ""))
        assert letters == sorted(text.replace(" ", ""))


def test_held_out_by_document(built):
    found = read_documents_of(built)
    train = {document for split, document in found if split == "train"}
    held_out = {document for split, document in found if split == "heldout"}
    assert train and held_out and not train & held_out
    assert len(held_out) < 30  # of 120, at a share of 0.1


def test_index_counts_everything(vocab, tmp_path):
    sentences = [["One sentence alone."], ["Word " * 100 + "end."], ["Two here.", "And there."]]
    path = write_wiki(tmp_path / "wiki", [*sentences, [], ["\u200b"]])
    index = build(tmp_path / "out", vocab, [path])
    counts = index["counts"]
    assert counts["documents"] == 3 and counts["empty_documents"] == 2
    assert counts["sentences"] == 4 and counts["empty_sentences"] == 1
    assert counts["cut_sentences"] == 1
    assert counts["tokens"] == sum(entry["tokens"] for entry in index["splits"].values())
    assert counts["sequences"] == sum(entry["samples"] for entry in index["splits"].values())
    assert sum(entry["documents"] for entry in index["splits"].values()) == 3
    assert counts["one_sentence_sequences"] == counts["sequences"] - 1
    assert index["fill"] == counts["tokens"] / counts["sequences"] / (SEQUENCE_LENGTH - 3)
    assert index == json.loads((tmp_path / "out" / "index.json").read_text())


def test_same_bytes_however_it_is_read(vocab, documents, tmp_path):
    """Another order of files and documents, and more buckets: the shuffle is a sort by hash."""
    one = write_wiki(tmp_path / "a", documents)
    build(tmp_path / "one", vocab, [one])
    first = write_wiki(tmp_path / "b", documents[:30][::-1])
    rest = write_wiki(tmp_path / "c", documents[30:])
    packed = tmp_path / "b.gz"
    packed.write_bytes(gzip.compress(first.read_bytes()))
    settings = {"sequence_length": SEQUENCE_LENGTH, "samples_per_shard": 8, "holdout": 0.1}
    (tmp_path / "two").mkdir()
    build_shards(
        read_documents([rest, packed]),
        vocab,
        tmp_path / "two",
        BuildConfig(**settings),
        input_bytes=100 << 20,
    )
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")
    build(tmp_path / "three", vocab, [one], seed=1)
    assert content_of(tmp_path / "one") != content_of(tmp_path / "three")


def test_copies_of_a_document_stay_together(vocab, documents, tmp_path):
    path = write_wiki(tmp_path / "a", documents[:20] * 2)
    index = build(tmp_path / "out", vocab, [path], holdout=0.3)
    assert {split: entry["documents"] % 2 for split, entry in index["splits"].items()} == {
        "train": 0,
        "heldout": 0,
    }
    read_documents_of(tmp_path / "out")


def test_order_is_shuffled(vocab, tmp_path):
    """Neighbours in the text are not neighbours in the shards."""
    path = write_wiki(tmp_path / "a", make_documents(60))
    build(tmp_path / "out", vocab, [path], holdout=0)
    source = open_shards(tmp_path / "out", "train")
    numbers = []
    for n in range(len(source.shards)):
        numbers += Shard(source, n).documents.tolist()
    same = sum(a == b for a, b in zip(numbers, numbers[1:], strict=False))
    assert same < len(numbers) / 10


def test_at_least_one_document_is_held_out_and_one_is_not(vocab, tmp_path):
    path = write_wiki(tmp_path / "a", make_documents(4))
    index = build(tmp_path / "out", vocab, [path], holdout=1e-9)
    assert index["splits"]["heldout"]["documents"] == 1
    index = build(tmp_path / "none", vocab, [path], holdout=0)
    assert index["splits"]["heldout"]["documents"] == 0
    with pytest.raises(UserError, match="its heldout split is empty"):
        open_shards(tmp_path / "none", "heldout")
    with pytest.raises(UserError, match="--holdout 0.9999999: would hold out all of the 4"):
        build(tmp_path / "all", vocab, [path], holdout=0.9999999)
    assert not (tmp_path / "all").exists()


def test_buckets_sort(tmp_path):
    draws = [(key * 0x9E3779B97F4A7C15) % (1 << 64) for key in range(500)]
    for number in (1, 7, 64):
        folder = tmp_path / str(number)
        folder.mkdir()
        buckets = Buckets(folder, number)
        for key in draws:
            buckets.add(key, Spilled(key.to_bytes(8, "big") * 50, 3, key, key % 2 == 0))
        buckets.flush()
        found = list(buckets.read_sorted())
        assert [spilled.draw for spilled in found] == sorted(draws)
        assert all(s.record == s.draw.to_bytes(8, "big") * 50 and s.tokens == 3 for s in found)
        assert not list(folder.iterdir())


def test_nothing_is_left_of_a_failed_build(vocab, tmp_path):
    def broken():
        yield Document(["Some text. And more."], 0)
        raise DamagedData("wiki_00: line 7 is not UTF-8")

    config = BuildConfig()
    with pytest.raises(DamagedData):
        build_shards(broken(), vocab, tmp_path / "out", config, input_bytes=0)
    with pytest.raises(UserError, match="hold no text"):
        build_shards([Document([], 0)], vocab, tmp_path / "out", config, input_bytes=0)
    assert not (tmp_path / "out").exists()


def test_left_overs_of_a_killed_build_are_removed(vocab, corpus, tmp_path):
    build(tmp_path / "clean", vocab, [corpus])
    out = tmp_path / "out"
    (out / "building").mkdir(parents=True)
    (out / "building" / "bucket-0000").write_bytes(b"left over")
    (out / "train-000999.tar").write_bytes(b"left over")
    (out / "train.tar.partial").write_bytes(b"left over")
    build(out, vocab, [corpus])
    assert content_of(out) == content_of(tmp_path / "clean")


def test_a_built_folder_is_not_overwritten(built, vocab, corpus):
    before = content_of(built)
    with pytest.raises(UserError, match="holds a built data set already"):
        build(built, vocab, [corpus])
    assert content_of(built) == before


@pytest.mark.parametrize(
    "setting", [{"sequence_length": 4}, {"holdout": 1.0}, {"samples_per_shard": 0}, {"seed": -1}]
)
def test_bad_settings(setting):
    with pytest.raises(UserError, match="--" + next(iter(setting)).replace("_", "-")):
        BuildConfig(**setting)
