"""Micro-batches of few shapes: N tokens, B sequences and P predicted positions padded to a bucket.

A CUDA graph repeats the launches of one shape, and oneDNN on a CPU prepares its kernels for each
number of rows. A bucket is a function of the micro-batch alone, so neither ranks nor a resume
change it. What is added are sequences of their own, whose loss nobody counts: no other sequence and
no count sees them. A bucket holds at least `SPARE` of their tokens, for the positions that predict
nothing.
"""

import math

import numpy as np

from albert_ds.data.segments import NO_LABEL
from albert_ds.data.stream_config import StreamConfig

SPARE = 16  # tokens, so that N stays a multiple of 16
# Of a micro-batch's longest possible one: what its tokens are rounded up to. Finer, and a run of 8
# sequences would have more than 16 buckets.
PARTS, MOST_PARTS, FINE = 64, 32, 128
# A sample's predictions are rounded, with a standard deviation of 0.29: so many are allowed for.
DEVIATIONS = 4 * 0.29


def find_step(capacity: int) -> int:
    """What the tokens of a micro-batch of at most `capacity` are rounded up to."""
    step = max(capacity // PARTS, min(capacity // MOST_PARTS, FINE))
    return max(step - step % SPARE, SPARE)


def fix_shapes(tensors: dict[str, np.ndarray], length: int, config: StreamConfig) -> bool:
    """Pad a micro-batch in place; False, and as it was, if it does not fit into its bucket.

    tensors: int64 `input_ids`, `token_type_ids`, `position_ids`, `seeds` [N], `cu_seqlens` [B + 1],
    `masked_positions`, `masked_labels` [P], `pair_labels` [B]. length: of the longest
    sequence that there may be; config: of the draws.
    """
    tokens, masked = len(tensors["input_ids"]), len(tensors["masked_positions"])
    sequences = len(tensors["pair_labels"])
    step = find_step(sequences * length)
    rounded = -(-tokens // step) * step
    room = rounded + SPARE
    most = math.ceil(config.masked_fraction * rounded + DEVIATIONS * sequences**0.5) + 1
    if config.max_predictions is not None:
        most = min(most, config.max_predictions * sequences)
    added, pads = room - tokens, most - masked
    if pads < 0:
        return False
    more = -(-(step + SPARE) // length)  # sequences
    ends = np.minimum(tokens + length * np.arange(1, more + 1), room)
    # Spread, because attention takes at most `length` queries of a sequence, and its [CLS] is one.
    positions = tokens + np.arange(pads) * added // max(pads, 1)
    if -(-pads * min(length, added) // added) + more + 1 > length:
        return False
    for name in ("input_ids", "token_type_ids", "position_ids", "seeds"):
        tensors[name] = np.pad(tensors[name], (0, added))
    tensors["cu_seqlens"] = np.concatenate([tensors["cu_seqlens"], ends])
    tensors["masked_positions"] = np.concatenate([tensors["masked_positions"], positions])
    for name, count in (("masked_labels", pads), ("pair_labels", more)):
        tensors[name] = np.pad(tensors[name], (0, count), constant_values=NO_LABEL)
    return True
