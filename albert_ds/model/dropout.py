"""Dropout (Srivastava et al. 2014) that no layout changes (`model/draws.py`), fast on a CPU too.

On a CPU torch draws a random number for each value, which at 512 tokens takes longer than the
attention itself. Here one random number covers a run of kept values: the distance from one dropped
value to the next is geometrically distributed. At probability 0.1 this takes a tenth of the draws,
and values are still dropped independently.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from albert_ds.model.device import takes_kernels
from albert_ds.model.draws import Draws, is_kept


class Dropout(nn.Dropout):
    """In training each value is 0 with probability p, else divided by 1 - p; [...] -> [...]."""

    def forward(self, input: Tensor, draws: Draws | None = None) -> Tensor:
        return drop(input, self.p if self.training else 0.0, draws)


def drop(x: Tensor, probability: float, draws: Draws | None = None) -> Tensor:
    """Set each value of x [N, H] to 0 with `probability`; divide the others by 1 - probability.

    draws: of the rows. None: from torch's generator.
    """
    if not probability:
        return x
    if draws is None:
        ends = torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
        draws = Draws.anew(ends, len(x))
    if x.is_cuda:
        return drop_rows(x, probability, draws.seeds, draws.number())
    begins, width = draws.ends[:-1].long(), x.size(1)
    index, sequence = draw_dropped(draws.keys(), draws.ends.diff().long() * width, probability)
    return drop_at(x, begins.index_select(0, sequence) * width + index, probability)


def drop_rows(x: Tensor, probability: float, seeds: Tensor, number: int) -> Tensor:
    """On CUDA: dropout of x [N, H] by a seed of each row, int64 [N], to which `number` is added."""
    if takes_kernels(x):
        from albert_ds.model import kernels  # imports Triton

        return kernels.Drop.apply(x, probability, seeds, number)
    return x * is_kept(seeds, number, x.size(1), probability) / (1 - probability)


def drop_at(x: Tensor, places: Tensor, probability: float) -> Tensor:
    """x [...] with 0 at these places, int64, and the other values divided by 1 - probability."""
    return _Drop.apply(x, places, 1 / (1 - probability))


def draw_dropped(keys: np.ndarray, counts: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Which values of several rows to drop, each with `probability`.

    keys: uint64 [S], of a generator for each row; counts: int64 [S], of its values. Returns the
    places in the rows, ascending, and the row of each: int64 [D] twice.
    """
    expected = counts * probability
    # Too few in one of 10^6 rows, which then has the same and more.
    draws = (expected + 5 * expected.sqrt() + 5).long().where(counts > 0, 0)
    generator, is_short = torch.Generator(), True
    while is_short:
        drawn, sizes = torch.empty(int(draws.sum())), draws.tolist()
        for part, key, size in zip(drawn.split(sizes), keys.tolist(), sizes, strict=True):
            if size:
                part.uniform_(generator=generator.manual_seed(key >> 1))
        row = torch.arange(len(draws)).repeat_interleave(draws)
        sums = drawn.neg_().log1p_().div_(math.log1p(-probability)).long().add_(1).cumsum(0)
        sums = torch.cat([sums.new_zeros(1), sums])
        ends = draws.cumsum(0)
        places = sums[1:] - sums.index_select(0, ends - draws).index_select(0, row) - 1
        short = sums.index_select(0, ends) - sums.index_select(0, ends - draws) <= counts
        short &= counts > 0
        is_short = bool(short.any())
        draws = torch.where(short, 2 * draws, draws)
    inside = places < counts.index_select(0, row)
    return places[inside], row[inside]


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
