"""The second pass of building: a range of keys from all sorted runs -> some shards.

The keys are hashes, so shards that share them out evenly hold about as many sequences each, and
which ones is known without counting. Copies of a document have the same keys, so they meet here,
wherever they were read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from albert_ds.data.runs import KEYS, Spilled, read_range
from albert_ds.data.shards import SPLITS, ShardInfo, write_shard

RANGE_BYTES = 16 << 20  # of records that are sorted in memory at a time
DUPLICATES = ("duplicate_documents", "duplicate_sequences", "duplicate_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
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
    low, high = part.keys
    members: dict[int, list[Spilled]] = {}
    last = None
    for spilled in read_range(runs, low, high, lowest_draw=draws[0], end_of_draws=draws[1]):
        is_copy = last is not None and (spilled.key, spilled.record) == (last.key, last.record)
        last = spilled
        if is_copy:
            counts["duplicate_documents"] += spilled.opens_document
            counts["duplicate_sequences"] += 1
            counts["duplicate_tokens"] += spilled.tokens
        if not (is_copy and dedup):
            counts["documents"] += spilled.opens_document
            members.setdefault(spilled.key * part.shards // KEYS, []).append(spilled)
    shards = [
        write_shard(
            output,
            f"{part.split}-{number:06d}.tar",
            [spilled.record for spilled in sequences],
            sum(spilled.tokens for spilled in sequences),
        )
        for number, sequences in sorted(members.items())
    ]
    return shards, counts
