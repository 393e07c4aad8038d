"""Sequences on their way to shards, in sorted runs on disk: an external merge sort.

A run is what a process encoded while it had room: its entries by ascending key, then the records.
What lies in a range of keys is found in each run by bisection, so a shard is read from all runs
without anything else being read, and memory holds one run or one range.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from albert_ds.data.ledger import write_file

RUN_BYTES = 16 << 20  # of records
KEYS = 1 << 64  # keys are hashes under this
_ENTRY = np.dtype(
    [("key", "<u8"), ("draw", "<u8"), ("end", "<u8"), ("tokens", "<u4"), ("opens", "?")]
)


class Spilled(NamedTuple):
    """A sequence on its way to a shard; sorts by its key."""

    key: int
    record: bytes
    tokens: int
    draw: int  # of its document, for the held-out split
    opens_document: bool  # the first sequence of its document


class RunWriter:
    """Collects sequences and writes the files stem-000.run, stem-001.run, ..."""

    def __init__(self, stem: Path):
        self.files: dict[Path, str] = {}  # written, with their sha256
        self._stem = stem
        self._waiting: list[Spilled] = []
        self._bytes = 0

    def add(self, spilled: Spilled) -> None:
        self._waiting.append(spilled)
        self._bytes += len(spilled.record)
        if self._bytes >= RUN_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        self._waiting.sort()
        ends = accumulate(len(s.record) for s in self._waiting)
        entries = np.array(
            [
                (s.key, s.draw, end, s.tokens, s.opens_document)
                for s, end in zip(self._waiting, ends, strict=True)
            ],
            _ENTRY,
        )
        content = b"".join(
            [
                np.uint64(len(entries)).tobytes(),
                entries.tobytes(),
                *(s.record for s in self._waiting),
            ]
        )
        path = self._stem.with_name(f"{self._stem.name}-{len(self.files):03d}.run")
        self.files[path] = write_file(path, content)
        self._waiting, self._bytes = [], 0


def read_range(
    runs: Iterable[Path], low: int, high: int, *, lowest_draw: int, end_of_draws: int
) -> list[Spilled]:
    """The sequences with low <= key < high whose draw is in the range, by ascending key."""
    found = []
    for path in runs:
        found += _read_range(path, low, high, lowest_draw, end_of_draws)
    found.sort()
    return found


def _read_range(
    path: Path, low: int, high: int, lowest_draw: int, end_of_draws: int
) -> Iterator[Spilled]:
    with path.open("rb") as file:
        number = int.from_bytes(file.read(8), "little")
        entries = np.memmap(file, _ENTRY, mode="r", offset=8, shape=number)
        first = bisect_left(entries, low, key=_key)
        # One entry more at the front: a record begins where the one before it ends.
        chosen: Any = np.array(entries[max(0, first - 1) : bisect_left(entries, high, key=_key)])
        del entries
        ends = chosen["end"].astype(np.int64)
        if first:
            begins, ends, chosen = ends[:-1], ends[1:], chosen[1:]
        else:
            begins = np.concatenate([[0], ends[:-1]])
        if not len(chosen):
            return
        origin = int(begins[0])
        file.seek(8 + number * _ENTRY.itemsize + origin)
        content = file.read(int(ends[-1]) - origin)
    wanted = (chosen["draw"] >= lowest_draw) & (chosen["draw"] < end_of_draws)
    places = zip(begins[wanted].tolist(), ends[wanted].tolist(), strict=True)
    for entry, (begin, end) in zip(chosen[wanted].tolist(), places, strict=True):
        key, draw, _, tokens, opens = entry
        yield Spilled(key, content[begin - origin : end - origin], tokens, draw, opens)


def _key(entry) -> int:
    return int(entry["key"])
