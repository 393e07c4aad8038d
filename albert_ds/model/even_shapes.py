"""Batches of few different shapes, for processors that prepare their kernels for each shape.

oneDNN, which torch uses for 16-bit products on CPUs, writes a kernel for every new number of rows.
Batches without padding nearly always bring a new one: at 16 sequences of 128 tokens and width 256
that took a third of the time of a step. fp32 products and GPUs take any shape at once.
Shapes: B sequences, N tokens, P masked positions.
"""

import torch.nn.functional as F
from torch import Tensor

TOKENS, MASKED = 128, 64  # N and P become multiples of these
IGNORED = -100  # the label that counts in no loss and no accuracy


def is_shape_bound(weight: Tensor) -> bool:
    """Whether products with this weight are prepared for each number of rows."""
    return weight.device.type == "cpu" and weight.dtype.itemsize == 2


def even_out(
    tokens: dict[str, Tensor], ends: Tensor, masked: Tensor, labels: Tensor, pairs: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Add one sequence of zeros, and masked positions in it, that no loss and no count reads.

    tokens: int64 [N] each; ends: int32 [B + 1]; masked, labels: int64 [P]; pairs: int64 [B].
    Returns the same with N and P rounded up and B + 1 sequences. The added sequence has at least
    one token, and its states reach no other sequence, so its gradients are 0.
    """
    number = int(len(next(iter(tokens.values()))))
    added = TOKENS - number % TOKENS
    fill = -len(masked) % MASKED
    return (
        {name: F.pad(x, (0, added)) for name, x in tokens.items()},
        F.pad(ends, (0, 1), value=number + added),
        F.pad(masked, (0, fill), value=number),
        F.pad(labels, (0, fill), value=IGNORED),
        F.pad(pairs, (0, 1), value=IGNORED),
    )
