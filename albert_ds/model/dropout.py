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

from albert_ds.model.device import can_use_triton
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
    width = x.size(1)
    begins = draws.ends[:-1].tolist()
    counts = [rows * width for rows in draws.ends.diff().tolist()]
    places = draw_dropped(draws.keys(), counts, probability)
    for begin, each in zip(begins, places, strict=True):
        each += begin * width
    return drop_at(x, places, probability)


def drop_rows(x: Tensor, probability: float, seeds: Tensor, number: int) -> Tensor:
    """On CUDA: dropout of x [N, H] by a seed of each row, int64 [N], to which `number` is added."""
    if can_use_triton(x):
        from albert_ds.model import kernels  # imports Triton

        return kernels.Drop.apply(x, probability, seeds, number)
    return x * is_kept(seeds, number, x.size(1), probability) / (1 - probability)


def drop_at(x: Tensor, places: list[np.ndarray], probability: float) -> Tensor:
    """x [...] with 0 at these places, int64, and the other values divided by 1 - probability."""
    dropped = torch.from_numpy(np.concatenate(places))
    return _Drop.apply(x, dropped, 1 / (1 - probability))


def draw_dropped(keys: np.ndarray, counts: list[int], probability: float) -> list[np.ndarray]:
    """Which values of several rows to drop, each with `probability`.

    keys: uint64 [S], of a generator for each row; counts: of its values. Returns the places in each
    row, ascending: int64. They are found by NumPy, whose calls cost less than torch's.
    """
    expected = [count * probability for count in counts]
    # Too few in one of 700 rows, which then has the same and more.
    sizes = [int(e + 3 * math.sqrt(e) + 5) if e else 0 for e in expected]
    generator = torch.Generator()
    drawn = torch.empty(sum(sizes))
    seeds = [key >> 1 for key in keys.tolist()]
    for part, seed in zip(drawn.split(sizes), seeds, strict=True):
        if len(part):
            part.uniform_(generator=generator.manual_seed(seed))
    ends = find_gaps(drawn, probability).cumsum(0).numpy()
    dropped = []
    begin = 0
    before = 0
    for seed, count, size in zip(seeds, counts, sizes, strict=True):
        row = ends[begin : begin + size]
        places = row[: row.searchsorted(before + count + 1)] - (before + 1)
        if len(row):
            begin += size
            before = int(row[-1])
        while len(places) == size > 0:
            size *= 2
            again = torch.empty(size).uniform_(generator=generator.manual_seed(seed))
            places = find_gaps(again, probability).cumsum(0).sub_(1).numpy()
            places = places[: places.searchsorted(count)]
        dropped.append(places)
    return dropped


def find_gaps(drawn: Tensor, probability: float) -> Tensor:
    """The distance from one dropped value to the next, int64, of numbers of [0, 1), in place."""
    return drawn.neg_().log1p_().div_(math.log1p(-probability)).long().add_(1)


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
