"""Dropout that is fast on a CPU too (Srivastava et al. 2014).

On a GPU this is torch's. On a CPU torch draws a random number for each value, which at 512 tokens
takes longer than the attention itself. Here one random number covers a run of kept values: the
distance from one dropped value to the next is geometrically distributed. At probability 0.1 this
takes a tenth of the draws, and values are still dropped independently. The numbers come from
torch's own generator, so restoring its state repeats them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from albert_ds.model.device import takes_kernels
from albert_ds.model.draws import Draws, is_kept


class Dropout(nn.Dropout):
    """In training each value is 0 with probability p, else divided by 1 - p; [...] -> [...]."""

    def forward(self, input: Tensor, draws: Draws | None = None) -> Tensor:
        return drop(input, self.p if self.training else 0.0, draws)


def drop(x: Tensor, probability: float, draws: Draws | None = None) -> Tensor:
    """Set each value of x [...] to 0 with `probability`; divide the others by 1 - probability."""
    if not probability:
        return x
    if draws is not None and x.is_cuda:
        if takes_kernels(x):
            from albert_ds.model import kernels  # imports Triton

            return kernels.Drop.apply(x, probability, draws)
        return x * is_kept(draws, x.size(1), probability) / (1 - probability)
    if x.device.type != "cpu" or probability == 1:
        return F.dropout(x, probability)
    return _Drop.apply(x, draw_dropped(x.numel(), probability), 1 / (1 - probability))


def draw_dropped(count: int, probability: float) -> Tensor:
    """Which of `count` values to drop, each with `probability`: ascending indices, int64."""
    expected = count * probability
    draws = int(expected + 5 * math.sqrt(expected) + 5)  # too few in one of 10^6 cases
    indices = torch.empty(0, dtype=torch.int64)
    last = -1
    while last < count:
        kept_between = torch.rand(draws).neg_().log1p_().div_(math.log1p(-probability)).long()
        more = kept_between.add_(1).cumsum(0).add_(last)
        indices = torch.cat([indices, more]) if len(indices) else more
        last = int(indices[-1])
    return indices[: int(torch.searchsorted(indices, count))]


class _Drop(torch.autograd.Function):
    """x * scale with the dropped values set to 0; keeps their indices for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, dropped: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(dropped)
        ctx.scale = scale
        return _drop(x, dropped, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _drop(gradient, *ctx.saved_tensors, ctx.scale), None, None


def _drop(x: Tensor, dropped: Tensor, scale: float) -> Tensor:
    scaled = torch.mul(x, scale).contiguous()
    scaled.view(-1).index_fill_(0, dropped, 0)
    return scaled
