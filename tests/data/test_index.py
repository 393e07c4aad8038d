"""A shard is what index.json says: its size, counts, order and content; an index is consistent.

Records whose own checksum holds are compared with the index too: they may be of another build.
"""

import hashlib
import json
import os
import shutil
import tracemalloc

import numpy as np
import pytest

from albert_ds.data.shards import (
    MAX_SHARD_BYTES,
    Shard,
    open_shards,
    pack_sequence,
    read_index,
    unpack_sequence,
    write_shard,
)
from albert_ds.data.storage import read_bytes
from albert_ds.errors import DamagedData, UserError

NUMBER = 2  # of the shard that is changed
U2 = np.dtype("<u2")


@pytest.fixture
def copy(built, tmp_path):
    return shutil.copytree(built, tmp_path / "data")


def records_of(folder, split="train", number=NUMBER) -> list[bytes]:
    source = open_shards(folder, split)
    shard = Shard(source, number)
    sequences = [shard[i] for i in range(len(shard))]
    return [pack_sequence(s.document, s.ends.tolist(), s.ids.tolist(), U2) for s in sequences]


def write(folder, records, *, listed: bool = False) -> str:
    """Replace a shard by whole records; `listed`: with its new sha256 and size in index.json."""
    index = read_index(folder)
    entry = index["splits"]["train"]["shards"][NUMBER]
    info = write_shard(folder, entry["name"], records, entry["tokens"])
    if listed:
        entry |= {"sha256": info.sha256, "bytes": info.bytes}
        (folder / "index.json").write_text(json.dumps(index))
    return str(folder / entry["name"])


def refuse(folder) -> str:
    """How the changed shard is refused."""
    with pytest.raises(DamagedData) as caught:
        shard = Shard(open_shards(folder, "train"), NUMBER)
        for number in range(len(shard)):
            shard[number]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_records_of_the_heldout_split_do_not_train(copy):
    records = records_of(copy)
    heldout = records_of(copy, "heldout", 0)
    path = write(copy, [*heldout, *records][: len(records)])
    message = refuse(copy)
    assert message.startswith(f"{path}: all its {len(records)} records can be read, but its ")
    assert message.endswith("of index.json: it is of another build, or was changed")


def test_the_order_of_whole_records_is_that_of_the_build(copy):
    records = records_of(copy)
    records[3], records[4] = records[4], records[3]
    path = write(copy, records)
    digest = hashlib.sha256((copy / "train-000002.tar").read_bytes()).hexdigest()
    assert path in refuse(copy) and f"its sha256 {digest} is not the" in refuse(copy)
    # Order is all that only the sha256 tells.
    write(copy, records, listed=True)
    shard = Shard(open_shards(copy, "train"), NUMBER)
    assert shard[3].document == int.from_bytes(records[3][8:16], "little")


@pytest.mark.parametrize("listed", [True, False])
def test_tokens_are_counted(copy, listed):
    records = records_of(copy)
    one = unpack_sequence(records[0], U2, 240)
    records[0] = pack_sequence(one.document, [1], one.ids[:1].tolist(), U2)
    path = write(copy, records, listed=listed)
    message = refuse(copy)
    assert path in message and " tokens " in message and "of index.json" in message


@pytest.mark.parametrize("ends", [[3, 2, 4], [2, 2, 4], [0, 4]])
def test_ends_that_do_not_rise_though_the_checksum_holds(copy, ends):
    records = records_of(copy)
    sequence = unpack_sequence(records[1], U2, 240)
    total = len(sequence.ids)
    records[1] = pack_sequence(7, [*ends[:-1], total], sequence.ids.tolist(), U2)
    path = write(copy, records, listed=True)
    message = refuse(copy)
    assert message.startswith(f"{path}: record train-000002-00001.seq: the ends of its ")


@pytest.mark.parametrize("listed", [True, False])
def test_a_large_sparse_shard_is_never_in_memory(copy, listed):
    """Its first member declares 2 GB, which are there as a hole in the file."""
    path, size = copy / "train-000002.tar", 2 << 30
    header = bytearray(path.read_bytes()[:512])
    header[124:136] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(header)
    os.truncate(path, size + 2048)
    if listed:
        index = read_index(copy)
        index["splits"]["train"]["shards"][NUMBER]["bytes"] = MAX_SHARD_BYTES + 1
        (copy / "index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match=r"shards.2.bytes \d+: must be a whole number.*at most"):
            open_shards(copy, "train")
        return
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


def spoil(index: dict, how: str) -> str:
    """Make an index contradict itself; returns what the message says."""
    train = index["splits"]["train"]
    match how:
        case "samples":
            train["samples"] += 1
            return rf"splits.train.samples {train['samples']}: must be {train['samples'] - 1}, the"
        case "tokens":
            train["tokens"] -= 1
            return rf"splits.train.tokens {train['tokens']}: must be {train['tokens'] + 1}, the sum"
        case "content":
            train["shards"][1]["sha256"] = train["shards"][0]["sha256"]
            return "names a shard twice: train-000000.tar, train-000001.tar"
        case "split":
            train["shards"][0]["name"] = "heldout-000009.tar"
            return "'heldout-000009.tar' is not the name of a shard of splits.train"
        case "heldout twice":
            train["shards"].append(dict(index["splits"]["heldout"]["shards"][0]))
            return "'heldout-000000.tar' is not the name of a shard of splits.train"
    raise AssertionError(how)


@pytest.mark.parametrize("how", ["samples", "tokens", "content", "split", "heldout twice"])
def test_an_index_that_contradicts_itself(copy, how):
    index = read_index(copy)
    words = spoil(index, how)
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=words):
        open_shards(copy, "train")
