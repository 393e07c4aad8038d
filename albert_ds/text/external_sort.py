"""An external merge sort: sequences in sorted runs on disk, and ranges of all runs as shards.

A run holds what a process encoded until its buffer was full: entries by ascending key, then the
records. A range of keys is found in each run by bisection, so a process reads only the range that
it writes, and memory holds one run or one range.

The keys are hashes, so shards that divide the keys evenly hold about as many sequences each, and
the range of a shard is known without counting. Copies of a document have the same keys, so they
meet in one range, whichever process read them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from albert_ds.base.errors import DamagedData
from albert_ds.base.files import write_file
from albert_ds.data.shards import SPLITS, ShardInfo, write_shard

RUN_BYTES = 16 << 20  # of records
KEYS = 1 << 64  # keys are hashes under this
RANGE_BYTES = 16 << 20  # of records that are sorted in memory at a time
DUPLICATES = ("duplicate_documents", "duplicate_sequences", "duplicate_tokens")
_FIELDS = np.dtype(
    [("key", "<u8"), ("draw", "<u8"), ("end", "<u8"), ("tokens", "<u4"), ("opens", "?")]
)
ENTRY = np.dtype([*_FIELDS.descr, ("crc32", "<u4")])  # of the record, then of the fields


class SortRecord(NamedTuple):
    """A sequence on its way to a shard; sorts by its key."""

    key: int
    content: bytes  # as in a shard
    tokens: int
    draw: int  # of its document, for the held-out split
    opens_document: bool  # the first sequence of its document


class RunWriter:
    """Collects sequences and writes the files stem-000.run, stem-001.run, ..."""

    def __init__(self, stem: Path):
        self.files: dict[Path, str] = {}  # written, with their sha256
        self._stem = stem
        self._waiting: list[SortRecord] = []
        self._bytes = 0

    def add(self, record: SortRecord) -> None:
        self._waiting.append(record)
        self._bytes += len(record.content)
        if self._bytes >= RUN_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        self._waiting.sort()
        contents = [s.content for s in self._waiting]
        ends = accumulate(map(len, contents))
        rows: Any = np.array(
            [
                (s.key, s.draw, end, s.tokens, s.opens_document, 0)
                for s, end in zip(self._waiting, ends, strict=True)
            ],
            ENTRY,
        )
        rows["crc32"] = list(map(_compute_crc32, contents, rows))
        head = [len(rows).to_bytes(8, "little"), rows.tobytes()]
        path = self._stem.with_name(f"{self._stem.name}-{len(self.files):03d}.run")
        self.files[path] = write_file(path, b"".join([*head, *contents]))
        self._waiting = []
        self._bytes = 0


def _compute_crc32(content: bytes, row: np.void) -> int:
    return crc32(row.tobytes()[: _FIELDS.itemsize], crc32(content))


def _read_range(path: Path, keys: tuple[int, int], draws: tuple[int, int]) -> Iterator[SortRecord]:
    """The sequences of a run with keys[0] <= key < keys[1], and with a draw likewise.

    Raises DamagedData for one whose checksum is another.
    """
    with path.open("rb") as file:
        number = int.from_bytes(file.read(8), "little")
        entries: Any = np.memmap(file, ENTRY, mode="r", offset=8, shape=number)
        first, last = (bisect_left(entries, key, key=lambda row: int(row["key"])) for key in keys)
        # A record begins where the one before it ends.
        origin = int(entries["end"][first - 1]) if first else 0
        chosen: Any = np.array(entries[first:last])
        del entries
        ends = [origin, *chosen["end"].tolist()]
        file.seek(8 + number * ENTRY.itemsize + origin)
        content = file.read(ends[-1] - origin)
    wanted = np.flatnonzero((chosen["draw"] >= draws[0]) & (chosen["draw"] < draws[1]))
    for at, entry in zip(wanted.tolist(), chosen[wanted], strict=True):
        key, draw, end, tokens, opens, checksum = entry.tolist()
        record = content[ends[at] - origin : end - origin]
        if _compute_crc32(record, entry) != checksum:
            raise DamagedData(
                f"{path}: not what was written; the command that encoded it does it again"
            )
        yield SortRecord(key, record, tokens, draw, opens)


class Range(NamedTuple):
    """Shards first .. last - 1 of the `shards` of a split, which share the keys out evenly."""

    split: str
    shards: int
    first: int
    last: int

    @property
    def keys(self) -> tuple[int, int]:
        return -(-self.first * KEYS // self.shards), -(-self.last * KEYS // self.shards)


def cut_ranges(counts: Mapping[str, int], holdout: float, samples_per_shard: int) -> list[Range]:
    """All shards of both splits, some at a time; a function of the text, not of who reads it."""
    ranges = []
    shares = {"train": 1 - holdout, "heldout": holdout}
    for split in SPLITS:
        samples = counts["sequences"] * shares[split]
        shards = max(1, round(samples / samples_per_shard))
        # Ends and ids take up to four bytes a token.
        a_shard = 4 * counts["tokens"] / counts["sequences"] * samples / shards
        step = max(1, int(RANGE_BYTES / max(a_shard, 1)))
        ranges += [
            Range(split=split, shards=shards, first=first, last=min(first + step, shards))
            for first in range(0, shards, step)
        ]
    return ranges


def write_range(
    part: Range, runs: list[Path], output: Path, threshold: int, *, dedup: bool
) -> tuple[list[ShardInfo], dict[str, int]]:
    """Write the shards of one range, empty ones left out; those and what was counted on the way.

    Documents whose draw is under `threshold` are held out. Copies are counted, and with `dedup`
    all but one are dropped.
    """
    counts = dict.fromkeys(("documents", *DUPLICATES), 0)
    draws = (0, threshold) if part.split == "heldout" else (threshold, KEYS)
    members: dict[int, list[SortRecord]] = {}
    last = None
    for record in sorted(record for run in runs for record in _read_range(run, part.keys, draws)):
        is_copy = last is not None and (record.key, record.content) == (last.key, last.content)
        last = record
        if is_copy:
            counts["duplicate_documents"] += record.opens_document
            counts["duplicate_sequences"] += 1
            counts["duplicate_tokens"] += record.tokens
        if not (is_copy and dedup):
            counts["documents"] += record.opens_document
            members.setdefault(record.key * part.shards // KEYS, []).append(record)
    shards = [
        write_shard(
            output,
            f"{part.split}-{number:06d}.tar",
            [record.content for record in sequences],
            sum(record.tokens for record in sequences),
        )
        for number, sequences in sorted(members.items())
    ]
    return shards, counts
