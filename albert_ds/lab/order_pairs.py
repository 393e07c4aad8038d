"""Held-out pairs of segments, without masks: what the order of two segments is judged on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from albert_ds.data.segments import NO_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def split_segments(batch: MicroBatch) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Both segments of each sequence, without [CLS] and [SEP], and its label, also `NO_LABEL`."""
    names = ("input_ids", "token_type_ids", "cu_seqlens", "pair_labels")
    ids, types, ends, labels = (np.asarray(batch.tensors[name]) for name in names)
    for (low, high), label in zip(pairwise(ends), labels, strict=True):
        mine, segment = ids[low:high], types[low:high]
        yield mine[segment == 0][1:-1], mine[segment == 1][:-1], int(label)


def keep_lengths(batch: MicroBatch, low: int, high: int) -> MicroBatch:
    """The same sequences; only pairs whose shorter segment has `low` to `high` - 1 tokens count."""
    tensors: dict[str, Any] = dict(batch.tensors)
    labels = tensors["pair_labels"] = tensors["pair_labels"].clone()
    for number, (first, second, _) in enumerate(split_segments(batch)):
        if not low <= min(len(first), len(second)) < high:
            labels[number] = NO_LABEL
    return replace(batch, tensors=tensors, pairs=int((labels != NO_LABEL).sum()))


def name_lengths(low: int, high: int) -> str:
    return f"of {low} to {high - 1} tokens" if high < LENGTHS[-1][1] else f"of {low} tokens or more"


def build_row(name: str, right: int, count: int) -> tuple[str, str, str, str]:
    """A row of a table: how many are right, its 95 % interval, and of how many."""
    from albert_ds.commands.probe import interval

    if not count:
        return name, "-", "-", "0"
    low, high = interval(right / count, count)
    return name, f"{right / count:.1%}", f"{low:.1%} .. {high:.1%}", f"{count:,}"
