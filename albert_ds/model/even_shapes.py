"""Numbers of rows rounded up, for processors that prepare their kernels for each number.

oneDNN, which torch uses for bf16 products on CPUs, writes a kernel for every new number of rows.
Sequences without padding nearly always bring a new one: at 16 sequences of 128 tokens and width 256
that took a third of the time of a step. fp32 products and GPUs take any number at once.
Shapes: B sequences, N tokens, R output positions, P masked positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from albert_ds.model.config import ROUND_ROWS, ROUND_TOKENS, ROUND_WIDTH
from albert_ds.model.cross_entropy import IGNORED


def is_shape_bound(x: Tensor) -> bool:
    """Whether the products of x are prepared for each number of rows.

    fp16 goes without: a layer norm of the added rows of zeros is NaN backwards there.
    """
    return x.is_cpu and x.dtype == torch.bfloat16


def round_tokens(ids: list[Tensor], ends: Tensor, max_seqlen: int) -> tuple[list[Tensor], Tensor]:
    """Add sequences of zeros that round N up: ids int64 [N] each, ends int32 [B + 1].

    None is longer than max_seqlen. Their states reach no other sequence, so if nobody reads them
    their gradients are 0.
    """
    number = len(ids[0])
    added = -number % ROUND_TOKENS
    if not added:
        return ids, ends
    new = [*range(number + max_seqlen, number + added, max_seqlen), number + added]
    return [F.pad(x, (0, added)) for x in ids], torch.cat([ends, ends.new_tensor(new)])


def round_width(ends: Tensor) -> int:
    """The longest sequence's length, rounded up: of ends int32 [B + 1]."""
    longest = int(ends.diff().max())
    return longest + -longest % ROUND_WIDTH


def round_positions(positions: Tensor, tokens: int) -> Tensor:
    """Name the last of these tokens again, so often that R is round: int64 [R], ascending."""
    return F.pad(positions, (0, -len(positions) % ROUND_ROWS), value=tokens - 1)


def round_labelled(states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Add rows of zeros whose labels are ignored: states [P, H], labels int64 [P]."""
    added = -len(labels) % ROUND_ROWS
    return F.pad(states, (0, 0, 0, added)), F.pad(labels, (0, added), value=IGNORED)
