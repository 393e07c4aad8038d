"""Records, shards and their index: what is written is read back, what is damaged is named.

Records whose own checksum holds are compared with the index too: they may be of another build.
"""

import json
import os
import pickle
import re
import shutil
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.storage import read_bytes
from albert_ds.data.shards import (
    MAX_SHARD_BYTES,
    Shard,
    open_shards,
    pack_sequence,
    read_index,
    token_dtype,
    unpack_sequence,
    write_shard,
)
from tests.data.corpus import SAMPLES_PER_SHARD
from tests.data.drawing import stored_sequences
from tests.models import Bomb


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.sampled_from(["<u2", "<u4"]),
)
def test_record_round_trip(document, lengths, kind):
    dtype = np.dtype(kind)
    ends = np.cumsum(lengths).tolist()
    ids = [(i * 7919) % 65536 for i in range(ends[-1])]
    record = pack_sequence(document, ends, ids, dtype)
    again = unpack_sequence(record, dtype, 65536)
    assert (again.document, again.ends.tolist(), again.ids.tolist()) == (document, ends, ids)
    for at in range(0, len(record), 5):
        damaged = bytearray(record)
        damaged[at] ^= 1
        with pytest.raises(ValueError):
            unpack_sequence(bytes(damaged), dtype, 65536)


def test_token_dtype():
    assert token_dtype(30_000) == token_dtype(65_536) == "uint16"
    assert token_dtype(65_537) == "uint32"


@pytest.fixture
def copy(built, tmp_path):
    """A built folder to be damaged."""
    return shutil.copytree(built, tmp_path / "data")


def read_all(folder, split="train"):
    return stored_sequences(open_shards(folder, split))


def test_counts_agree_with_what_is_read(built):
    index = json.loads((built / "index.json").read_text())
    for split in ("train", "heldout"):
        sequences = read_all(built, split)
        entry = index["splits"][split]
        assert len(sequences) == entry["samples"] == sum(s["samples"] for s in entry["shards"])
        assert sum(len(s.ids) for s in sequences) == entry["tokens"]
        assert len({s.document for s in sequences}) == entry["documents"]
        sizes = [shard["samples"] for shard in entry["shards"]]
        assert SAMPLES_PER_SHARD / 2 < sum(sizes) / len(sizes) < SAMPLES_PER_SHARD * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # leaves files open
def test_any_webdataset_reader_reads_a_shard(built):
    webdataset = pytest.importorskip("webdataset")
    source = open_shards(built, "train")
    source = replace(source, shards=source.shards[1:2])
    path = str(built / source.shards[0].name)
    pipeline = webdataset.DataPipeline(
        webdataset.SimpleShardList([path]), webdataset.tarfile_to_samples()
    )
    samples = list(pipeline)
    assert len({sample["__key__"] for sample in samples}) == source.shards[0].samples
    for entry, sequence in zip(samples, stored_sequences(source), strict=True):
        again = unpack_sequence(entry["seq"], source.token_dtype, source.vocab.size)
        assert again.ids.tolist() == sequence.ids.tolist()


NUMBER = 2  # of the shard that is changed
NAME = "train-000002.tar"
U2 = np.dtype("<u2")


def refuse(folder, error=DamagedData) -> str:
    """The one line that says why a split cannot be read."""
    with pytest.raises(error) as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def find_member(content, number):
    return content.index(b"train-000002-%05d.seq" % number)


def flip(content, at):
    content[at] ^= 1
    return content


def without_member(content, number):
    begin = find_member(content, number)
    end = find_member(content, number + 1)
    return content[:begin] + content[end:]


@pytest.mark.parametrize(
    "change, record, complaint",
    [
        (lambda c: flip(c, find_member(c, 3) + 512 + 20), 3, "its checksum is wrong"),
        (lambda c: flip(c, find_member(c, 3)), 3, "its tar header is damaged"),
        (lambda c: flip(c, find_member(c, 3) + 130), 3, "its tar header is damaged"),
        (lambda c: c[: find_member(c, 5) + 530], 5, "the shard is cut short within it"),
        (lambda c: c[: find_member(c, 5) + 30], 5, "the shard is cut short before it"),
        (lambda c: c[: find_member(c, 5)], 5, "the shard is cut short before it"),
        (lambda c: without_member(c, 4), 4, "missing; train-000002-00005.seq is in its place"),
        (lambda c: c[: find_member(c, 7)] + bytes(1024), 7, "missing; the end is in its place"),
        (lambda c: bytearray(), 0, "the shard is cut short before it"),
    ],
)
def test_damage_is_named(copy, change, record, complaint):
    path = copy / NAME
    path.write_bytes(change(bytearray(path.read_bytes())))
    assert refuse(copy) == f"{path}: record train-000002-0000{record}.seq: {complaint}"


def test_more_records_than_listed(copy):
    index = read_index(copy)
    for entry in (index["splits"]["train"], index["splits"]["train"]["shards"][NUMBER]):
        entry["samples"] -= 1
    (copy / "index.json").write_text(json.dumps(index))
    assert "more records than the 9 of index.json" in refuse(copy)


def records_of(folder, split="train", number=NUMBER) -> list[bytes]:
    shard = Shard(open_shards(folder, split), number)
    sequences = [shard[i] for i in range(len(shard))]
    return [pack_sequence(s.document, s.ends.tolist(), s.ids.tolist(), U2) for s in sequences]


def write(folder, records, *, listed: bool = False) -> None:
    """Replace a shard by whole records; `listed`: with its new sha256 and size in index.json."""
    index = read_index(folder)
    entry = index["splits"]["train"]["shards"][NUMBER]
    info = write_shard(folder, NAME, records, entry["tokens"])
    if listed:
        entry |= {"sha256": info.sha256, "bytes": info.bytes}
        (folder / "index.json").write_text(json.dumps(index))


ONE = "record train-000002-00001.seq: "


@pytest.mark.parametrize(
    ("ends", "ids", "words"),
    [
        ([3, 2], [], ONE + "the ends of its 3 sentences do not rise"),
        ([2, 2], [], ONE + "the ends of its 3 sentences do not rise"),
        ([0], [], ONE + "the ends of its 2 sentences do not rise"),
        ([], [240], ONE + "token id 240 is not under the vocabulary size 240"),
    ],
)
def test_a_record_that_is_wrong_though_all_checksums_hold(copy, ends, ids, words):
    """`ends` are put before its own, and `ids` in place of its first."""
    records = records_of(copy)
    sequence = unpack_sequence(records[1], U2, 240)
    ids = [*ids, *sequence.ids.tolist()[len(ids) :]]
    records[1] = pack_sequence(7, [*ends, len(ids)], ids, U2)
    write(copy, records, listed=True)
    assert refuse(copy).startswith(f"{copy / NAME}: {words}")


@pytest.mark.parametrize("which", ["in another order", "of the held-out split"])
def test_whole_records_that_are_not_those_of_the_build(copy, which):
    records = records_of(copy)
    if which == "in another order":
        records[3:5] = records[4:2:-1]
    else:
        records = [*records_of(copy, "heldout", 0), *records][: len(records)]
    write(copy, records)
    message = refuse(copy)
    assert message.startswith(f"{copy / NAME}: all its {len(records)} records can be read, but its")
    assert message.endswith("of index.json: it is of another build, or was changed")


def write_pickle(path: Path, protocol: int = 2) -> bytes:
    return pickle.dumps(Bomb(path), protocol=protocol)


def rewrite_first_member(path: Path, content: bytes | None = None, **changes) -> None:
    """The same tar, its first member with other fields, and `content` if it is given."""
    with tarfile.open(path) as tar:
        members = [(m, tar.extractfile(m).read()) for m in tar.getmembers()]  # ty: ignore
    content = members[0][1] if content is None else content
    for name, value in {"size": len(content), **changes}.items():
        setattr(members[0][0], name, value)
    members[0] = (members[0][0], content)
    with open(path, "wb") as file:
        for member, data in members:
            file.write(member.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512))
        file.write(bytes(1024))


NAMES = ("../../evil.seq", "/etc/passwd", "..", "train-000000-00000.seq/../x", "a" * 90, "")
KINDS = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
HOSTILE = [
    *({"name": name} for name in NAMES),
    *({"type": kind, "linkname": "/etc/passwd", "content": b""} for kind in KINDS),
    *({"size": size} for size in (8**11 - 1, 2**62, 2**40, 10**9, 0)),
]


def test_a_hostile_member_is_refused_and_nothing_of_it_is_written_or_run(copy, tmp_path):
    path, bomb = copy / "train-000000.tar", tmp_path / "ran"
    pickles = [{"content": write_pickle(bomb, protocol)} for protocol in range(6)]
    whole = path.read_bytes()
    before = sorted(tmp_path.rglob("*"))
    for changes in HOSTILE + pickles:
        path.write_bytes(whole)
        rewrite_first_member(path, **changes)
        with pytest.raises(DamagedData, match="record") as error:
            read_all(copy)
        assert str(path) in str(error.value), changes
        assert sorted(tmp_path.rglob("*")) == before, changes


def test_vocabulary_of_another_build(copy, tmp_path):
    path = copy / "spiece.model"
    model = path.read_bytes()
    bomb = tmp_path / "ran"
    longer = model + b"\n\x08\n\x03abc\x15\x00\x00\x00\x00"  # a piece more
    for other in (model[:-1], b"", flip(bytearray(model), 99), longer, write_pickle(bomb)):
        path.write_bytes(other)
        with pytest.raises(UserError, match="not the vocabulary these shards were built with"):
            open_shards(copy, "train")
    assert not bomb.exists()
    path.unlink()
    with pytest.raises(UserError, match="spiece.model: no such file"):
        open_shards(copy, "train")
    path.mkdir()
    with pytest.raises(UserError, match="spiece.model"):
        open_shards(copy, "train")


def test_a_large_sparse_shard_is_never_in_memory(copy):
    """Its first member declares 2 GB, which are there as a hole in the file."""
    path = copy / NAME
    size = 2 << 30
    header = bytearray(path.read_bytes()[:512])
    header[124:136] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(header)
    os.truncate(path, size + 2048)
    tracemalloc.start()
    try:
        message = refuse(copy)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert f"{path}: record train-000002-00000.seq: its {size} bytes go beyond the " in message


def test_no_file_is_read_beyond_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(str(tmp_path / "file"), 3) == b"123"
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    for name in ("pipe", "."):
        with pytest.raises(UserError, match="not a file"):
            read_bytes(str(tmp_path / name), 3)


def name_first(name: str):
    return lambda train: train["shards"][0].update(name=name)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop("shards"), 'no "splits.train.shards" in it'),
        (
            lambda t: t["shards"][2].update(bytes=MAX_SHARD_BYTES + 1),
            r"shards.2.bytes \d+: must be a whole number.*at most",
        ),
        (lambda t: t.update(samples=7), r"splits.train.samples 7: must be \d+, the sum"),
        (lambda t: t.update(tokens=7), r"splits.train.tokens 7: must be \d+, the sum"),
        (
            lambda t: t["shards"][1].update(sha256=t["shards"][0]["sha256"]),
            "names a shard twice: train-000000.tar, train-000001.tar",
        ),
        (name_first("heldout-000009.tar"), "is not the name of a shard of splits.train"),
        (name_first("pipe:cat /etc/passwd"), "is not the name of a shard"),
        (name_first("../train-000000.tar"), "is not the name of a shard"),
        (name_first("http://x/a.tar"), "is not the name of a shard"),
    ],
)
def test_an_index_that_is_wrong_or_contradicts_itself(copy, spoil, words):
    index = read_index(copy)
    spoil(index["splits"]["train"])
    (copy / "index.json").write_text(json.dumps(index))
    assert re.search(words, refuse(copy, UserError))


def test_an_index_of_another_format(copy):
    (copy / "index.json").write_text('{"format": 99}')
    assert "index.json: format 99: must be 1" in refuse(copy, UserError)
