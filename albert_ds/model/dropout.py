"""Dropout whose random bits cost little on a CPU; on CUDA it is torch's.

torch draws one double a value there, which at 512 tokens takes longer than the attention whose
probabilities it drops. Sixteen bits a value decide as well: a probability is a multiple of 2^-16,
and the kept values are scaled by exactly what that multiple leaves, so the expectation is exact.
The bits come from torch's own generator: what replays that, replays these.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEVELS = 1 << 16  # of the bits that decide on one value
WORD = 4  # values that one random int64 decides on


class Dropout(nn.Dropout):
    """In training each value is 0 with probability p, and larger else; [...] -> [...]."""

    def forward(self, input: Tensor) -> Tensor:
        return drop(input, self.p if self.training else 0.0)


def drop(x: Tensor, probability: float) -> Tensor:
    """Set each value of x [...] to 0 with `probability`, and divide the others by what is left."""
    if not probability:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, probability)
    dropped = round(probability * LEVELS)
    return _Drop.apply(x, draw_kept(x, dropped), LEVELS / (LEVELS - dropped))


def draw_kept(x: Tensor, dropped: int) -> Tensor:
    """Which values of x stay: bool like x, False `dropped` times in `LEVELS`."""
    words = torch.empty(-(-x.numel() // WORD), dtype=torch.int64).random_(-(1 << 63), None)
    return (words.view(torch.int16)[: x.numel()] >= dropped - LEVELS // 2).view(x.shape)


class _Drop(torch.autograd.Function):
    """x * kept * scale; keeps one byte a value for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return (x * kept).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return (gradient * kept).mul_(ctx.scale), None, None
