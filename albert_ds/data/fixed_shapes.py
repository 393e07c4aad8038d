"""Micro-batches of few shapes: N tokens, B sequences and P predicted positions padded to a bucket.

Who needs them: `model/even_shapes.py`. A bucket is a function of the micro-batch alone, so neither
ranks nor a resume change it. What is added are sequences of their own, whose loss nobody counts: no
other sequence and no count sees them. A bucket holds at least `SPARE` of their tokens, for the
positions that predict nothing.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from albert_ds.data.masking import count_predictions
from albert_ds.data.segments import NO_LABEL
from albert_ds.data.stream_config import StreamConfig
from albert_ds.model.even_shapes import SPARE, STEP, pad_tokens, round_tokens

# Of a micro-batch's longest possible one: what its tokens are rounded up to. Finer, and a run of 8
# sequences would have more than 16 buckets.
PARTS = 64
# The predictions of a sample are rounded, over all lengths with a standard deviation of 0.29: so
# many are allowed for.
DEVIATIONS = 4 * 0.29
ROWS = "input_ids", "token_type_ids", "position_ids", "seeds"  # [N]


def find_step(capacity: int) -> int:
    """What the tokens of a micro-batch of at most `capacity` are rounded up to."""
    return max(capacity // PARTS // STEP, 1) * STEP


def find_most_predictions(tokens: int, sequences: int, length: int, config: StreamConfig) -> int:
    """P that holds the predictions of `sequences` samples of at most `length`, `tokens` in all.

    Full samples all round alike. So it holds those of any number of them beside samples of other
    lengths, whose deviation grows with the root of their number: where that is `others`, the sum is
    largest.
    """
    full = count_predictions(length, config.masked_fraction, config.max_predictions)
    rounding = full - config.masked_fraction * length
    others = sequences
    if rounding > 0:
        others = min(sequences, (DEVIATIONS / (2 * rounding)) ** 2)
    allowed = (sequences - others) * rounding + DEVIATIONS * others**0.5
    return min(math.ceil(config.masked_fraction * tokens + allowed) + 1, sequences * full)


def fix_shapes(tensors: dict[str, Tensor], length: int, config: StreamConfig) -> bool:
    """Pad a micro-batch in place; False, and as it was, if it does not fit into its bucket.

    tensors: int64 ROWS [N], `masked_positions`, `masked_labels` [P], `pair_labels` [B], and
    `cu_seqlens` int32 [B + 1]. length: of the longest sequence that there may be; config: of the
    draws.
    """
    tokens, masked = len(tensors["input_ids"]), len(tensors["masked_positions"])
    sequences = len(tensors["pair_labels"])
    step = find_step(sequences * length)
    room = round_tokens(tokens + SPARE, step)
    most = find_most_predictions(room - SPARE, sequences, length, config)
    added, pads = room - tokens, most - masked
    more = -(-(step + SPARE) // length)  # sequences
    # Attention takes at most `length` queries of a sequence: the positions in it, its [CLS], and
    # those of empty ones before it.
    longest = -(-added // more)
    if pads < 0 or -(-pads * longest // added) + -(-more // added) > length:
        return False
    positions = tokens + torch.arange(pads) * added // max(pads, 1)  # spread, for the same reason
    rows = [tensors[name] for name in ROWS]
    rows, tensors["cu_seqlens"] = pad_tokens(rows, tensors["cu_seqlens"], room, more)
    tensors.update(zip(ROWS, rows, strict=True))
    tensors["masked_positions"] = torch.cat([tensors["masked_positions"], positions])
    for name, count in (("masked_labels", pads), ("pair_labels", more)):
        tensors[name] = F.pad(tensors[name], (0, count), value=NO_LABEL)
    return True
