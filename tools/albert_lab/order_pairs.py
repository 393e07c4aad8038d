"""Held-out pairs of segments, without masks: what the order of two segments is judged on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from albert_ds.data.segments import NO_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from albert_ds.data.samples import MicroBatch
    from albert_ds.data.shards import ShardSet

BATCH = 64  # sequences of one forward pass
LENGTHS = list(pairwise((1, 25, 40, 1 << 30)))  # classes of the shorter segment, in tokens


def draw_pairs(source: ShardSet, samples: int, longest: int) -> Iterator[MicroBatch]:
    """The first `samples` sequences of a split, of at most `longest` tokens, with their masks."""
    from albert_ds.data.stream import heldout_batches
    from albert_ds.data.stream_config import StreamConfig

    stream = StreamConfig(objective="sop", sequence_length=longest)
    return heldout_batches(
        source, stream, limit=samples, micro_batch_size=BATCH, dp_rank=0, dp_size=1
    )


def show(batch: MicroBatch) -> MicroBatch:
    """The same sequences without masks."""
    tensors: dict[str, Any] = dict(batch.tensors)
    tensors["input_ids"] = tensors["input_ids"].index_copy(
        0, tensors["masked_positions"], tensors["masked_labels"]
    )
    return replace(batch, tensors=tensors)


def list_pairs(batches: Iterable[MicroBatch]) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Both segments of each labelled pair, without [CLS] and [SEP], and its label."""
    found = []
    for batch in batches:
        names = ("input_ids", "token_type_ids", "cu_seqlens", "pair_labels")
        ids, types, ends, labels = (np.asarray(batch.tensors[name]) for name in names)
        for (low, high), label in zip(pairwise(ends), labels, strict=True):
            if label != NO_LABEL:
                mine, segment = ids[low:high], types[low:high]
                found.append((mine[segment == 0][1:-1], mine[segment == 1][:-1], int(label)))
    return found


def group_by_length(
    pairs: Iterable[tuple[np.ndarray, np.ndarray, int]], right: Iterable[bool]
) -> dict[str, list[int]]:
    """Of each class of `LENGTHS`, by its name: how many pairs are right, of how many."""
    found = {name_lengths(*limits): [0, 0] for limits in LENGTHS}
    for (first, second, _), is_right in zip(pairs, right, strict=True):
        shorter = min(len(first), len(second))
        limits = next(limits for limits in LENGTHS if limits[0] <= shorter < limits[1])
        count = found[name_lengths(*limits)]
        count[0] += bool(is_right)
        count[1] += 1
    return found


def name_lengths(low: int, high: int) -> str:
    return f"{low} to {high - 1} tokens" if high < LENGTHS[-1][1] else f"{low} tokens or more"


def build_row(name: str, right: int, count: int) -> tuple[str, str, str, str]:
    """A row of a table: how many are right, its 95 % interval, and of how many."""
    from albert_ds.commands.probe import interval

    if not count:
        return name, "-", "-", "0"
    low, high = interval(right / count, count)
    return name, f"{right / count:.1%}", f"{low:.1%} .. {high:.1%}", f"{count:,}"
