"""Numbers of rows rounded up, where a processor prepares its kernels for each number.

oneDNN, which torch uses for bf16 products on CPUs, writes a kernel for every new number of rows.
Sequences without padding nearly always bring a new one: at 16 sequences of 128 tokens and width 256
that took a third of the time of a step. A CUDA graph repeats the launches of one shape. fp32
products, and GPUs without graphs, take any number at once.
Training rounds whole micro-batches (`data/fixed_shapes.py`); the model rounds the tokens of others.
Shapes: B sequences, N tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

STEP, SPARE = 128, 16  # tokens: N is a multiple of a step, and SPARE more
WIDTH = 16  # the longest sequence of a padded copy is a multiple of it


def is_shape_bound(x: Tensor) -> bool:
    """Whether the products of x are prepared for each number of rows.

    fp16 goes without: a layer norm of the added rows of zeros is NaN backwards there.
    """
    return x.is_cpu and x.dtype == torch.bfloat16


def round_tokens(tokens: int, step: int = STEP) -> int:
    """The next round number of tokens, or this one if it is round."""
    return tokens + (SPARE - tokens) % step


def pad_tokens(
    rows: list[Tensor], ends: Tensor, room: int, sequences: int
) -> tuple[list[Tensor], Tensor]:
    """Add `sequences` of zeros, alike in length, up to N = room: rows [N] each, ends [B + 1].

    Some may be empty. Their states reach no other sequence, so if nobody reads them their gradients
    are 0.
    """
    number = len(rows[0])
    added = room - number
    new = number + torch.arange(1, sequences + 1, device=ends.device) * added // sequences
    return [F.pad(x, (0, added)) for x in rows], torch.cat([ends, new.to(ends)])


def round_width(ends: Tensor) -> int:
    """The longest sequence's length, rounded up: of ends int32 [B + 1]."""
    longest = int(ends.diff().max())
    return longest + -longest % WIDTH
