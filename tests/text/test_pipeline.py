"""Building loses no token, counts what it drops, and gives the same bytes however it is run."""

import gzip
import json
from itertools import chain, pairwise

import pytest

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.data.shards import open_shards
from albert_ds.text.documents import TextConfig
from tests.data.corpus import SEQUENCE_LENGTH, build, make_documents, read_all, write_wiki
from tests.data.drawing import stored_sequences


def read_documents_of(folder):
    """(split, document) -> all its sequences."""
    sequences = {}
    for split in ("train", "heldout"):
        for sequence in stored_sequences(open_shards(folder, split)):
            sequences.setdefault((split, sequence.document), []).append(sequence)
    return sequences


def content_of(folder):
    paths = sorted(folder.iterdir())
    return {path.name: path.read_bytes() if path.is_file() else None for path in paths}


def sentences_of(sequence):
    bounds = pairwise([0, *sequence.ends.tolist()])
    return [tuple(sequence.ids[begin:end].tolist()) for begin, end in bounds]


def test_no_token_is_lost(built, vocab, corpus):
    """Put together, the sequences of a document are its sentences, each once and in order; so
    none is in both splits."""
    longest = SEQUENCE_LENGTH - 3
    documents = [
        [
            tuple(ids[i : i + longest])
            for ids in vocab.encode(TextConfig().split(document.lines))
            for i in range(0, len(ids), longest)
        ]
        for document in read_all([corpus])
    ]
    places = {s: at for document in documents for at, s in enumerate(document)}
    texts = []
    stored = read_documents_of(built)
    for sequences in stored.values():
        parts = sorted(map(sentences_of, sequences), key=lambda part: places[part[0]])
        texts.append([*chain(*parts)])
    assert sorted(texts) == sorted(documents)
    assert 0 < sum(split == "heldout" for split, _ in stored) < 30  # of 120, at a share of 0.1


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


def test_same_bytes_however_it_is_read(vocab, documents, tmp_path, monkeypatch):
    """Another order of files and documents, units, runs and ranges of another size: the shuffle is
    a sort by hash. The index alone tells which files were read."""
    one = write_wiki(tmp_path / "a", documents)
    build(tmp_path / "one", vocab, [one])
    first = write_wiki(tmp_path / "b", documents[:30][::-1])
    rest = write_wiki(tmp_path / "c", documents[30:])
    packed = tmp_path / "d.gz"
    packed.write_bytes(gzip.compress(first.read_bytes()))
    monkeypatch.setattr("albert_ds.text.external_sort.RUN_BYTES", 2000)
    monkeypatch.setattr("albert_ds.text.external_sort.RANGE_BYTES", 3000)
    monkeypatch.setattr("albert_ds.text.sources.UNIT_BYTES", 5000)
    build(tmp_path / "two", vocab, [rest, packed])
    contents = [content_of(tmp_path / name) for name in ("one", "two")]
    indices = [json.loads(content.pop("index.json")) for content in contents]
    files = [index.pop("input") for index in indices]
    assert contents[0] == contents[1] and indices[0] == indices[1]
    assert [[file["name"] for file in inputs] for inputs in files] == [["a"], ["c", "d.gz"]]
    build(tmp_path / "three", vocab, [one], seed=1)
    assert content_of(tmp_path / "one") != content_of(tmp_path / "three")


def test_copies_of_a_document_stay_together(vocab, documents, tmp_path):
    path = write_wiki(tmp_path / "a", documents[:20] * 2)
    index = build(tmp_path / "out", vocab, [path], holdout=0.3)
    assert [entry["documents"] % 2 for entry in index["splits"].values()] == [0, 0]


def test_order_is_shuffled(vocab, tmp_path):
    """Neighbours in the text are not neighbours in the shards."""
    path = write_wiki(tmp_path / "a", make_documents(60))
    build(tmp_path / "out", vocab, [path], holdout=0)
    stored = stored_sequences(open_shards(tmp_path / "out", "train"))
    same = sum(one.document == other.document for one, other in pairwise(stored))
    assert same < len(stored) / 10


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
    assert content_of(tmp_path / "all").keys() == {"building"}  # the text is not encoded again
    assert build(tmp_path / "all", vocab, [path])["counts"]["documents"] == 4


def test_dedup_keeps_one_of_each_and_counts_close(vocab, documents, tmp_path):
    once = write_wiki(tmp_path / "once", documents[:20])
    twice = write_wiki(tmp_path / "twice", documents[:20] + documents[5:15])
    plain = build(tmp_path / "plain", vocab, [once])
    kept = build(tmp_path / "kept", vocab, [twice])
    dropped = build(tmp_path / "dropped", vocab, [twice], dedup=True)
    for index in (kept, dropped):
        assert index["counts"]["documents"] == 30
        assert index["counts"]["duplicate_documents"] == 10
    for what, counted in (
        ("samples", "sequences"),
        ("tokens", "tokens"),
        ("documents", "documents"),
    ):
        held = {
            name: sum(entry[what] for entry in index["splits"].values())
            for name, index in (("plain", plain), ("kept", kept), ("dropped", dropped))
        }
        duplicates = dropped["counts"][f"duplicate_{counted}"]
        assert held["kept"] == kept["counts"][counted]
        assert held["dropped"] == held["plain"] == dropped["counts"][counted] - duplicates

    def sequences(folder):
        return {
            (split, document): sorted(tuple(s.ids.tolist()) for s in parts)
            for (split, document), parts in read_documents_of(folder).items()
        }

    assert sequences(tmp_path / "dropped") == sequences(tmp_path / "plain")


def test_damaged_documents_are_counted_up_to_a_share(vocab, documents, tmp_path):
    sound = write_wiki(tmp_path / "sound", documents[:19])
    damaged = tmp_path / "damaged"
    damaged.write_bytes(sound.read_bytes() + b'<doc id="x">\n\xff\n</doc>\n')
    with pytest.raises(DamagedData) as error:
        build(tmp_path / "few", vocab, [damaged], max_damaged=0.04)
    line = sound.read_bytes().count(b"\n") + 1
    assert str(error.value) == (
        "1 damaged documents, beside 19 sound ones, are over --max-damaged 0.04: "
        f"wrong_encoding first at {damaged}: line {line}"
    )
    # What was read is kept: with another limit only the shards are left to be written.
    index = build(tmp_path / "few", vocab, [damaged], max_damaged=0.05)
    assert index["counts"]["damaged_wrong_encoding"] == 1 and index["counts"]["documents"] == 19
    build(tmp_path / "sound_only", vocab, [sound])
    shards = {name for name in content_of(tmp_path / "few") if name.endswith(".tar")}
    for name in shards:
        assert content_of(tmp_path / "few")[name] == content_of(tmp_path / "sound_only")[name]
