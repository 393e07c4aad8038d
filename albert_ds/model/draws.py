"""Where dropout takes its random numbers from, so that no layout changes them.

A token has a seed: a function of the run's, of the sample's place in the stream and of the token's
in the sample, whatever else is in the micro-batch and on whichever rank it is. Each site of the
model that draws adds its own number to it. On CUDA a row draws by its token's seed, and that lies
on the device: no launch holds a number of one step. On a CPU a sequence draws by its first token's,
from a generator of its own (`model/dropout.py`).
Shapes: B sequences, N tokens, R output positions.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

SPREAD = 0x9E3779B97F4A7C15  # golden ratio x 2^64: what sites add to a seed is far apart
# Philox (Salmon et al. 2011), as Triton and torch have it on CUDA.
FACTORS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draws:
    """The seeds of rows, int64 [N], the bounds of their sequences, int32 [B + 1], and a site."""

    seeds: Tensor
    ends: Tensor
    site: int = 0

    @classmethod
    def anew(cls, ends: Tensor, rows: int) -> "Draws":
        """Of torch's generator for the device."""
        return cls(torch.empty(rows, dtype=torch.int64, device=ends.device).random_(), ends)

    def at(self, site: int) -> "Draws":
        return replace(self, site=site)

    def of(self, rows: Tensor) -> "Draws":
        """Those of rows by index, int64 [R], ascending, with the first of each sequence."""
        ends = torch.searchsorted(rows, self.ends, out_int32=True)
        return replace(self, seeds=self.seeds.index_select(0, rows), ends=ends)

    def number(self) -> int:
        """What a kernel adds to each seed."""
        return (self.site + 1) * SPREAD % 2**63

    def keys(self) -> np.ndarray:
        """On the host: of each sequence, uint64 [B]; an empty one's means nothing."""
        first = self.ends[:-1].clamp(max=max(len(self.seeds) - 1, 0)).long()
        seeds = self.seeds[first].numpy().view(np.uint64)
        return mix(seeds + np.array([self.number()], np.uint64))


def draw_seeds(seed: int, sample_ids: list[int], lengths: np.ndarray) -> np.ndarray:
    """A seed for each token, int64 [N]: of the run's, the sample's place and the token's in it."""
    keys = mix(mix(np.array([seed], np.uint64)) + np.array(sample_ids, np.uint64))
    begins = np.repeat(lengths.cumsum() - lengths, lengths)
    position = (np.arange(len(begins)) - begins).astype(np.uint64)
    return mix(np.repeat(keys, lengths) + position).view(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 whose neighbours are far apart (SplitMix64, Steele et al. 2014)."""
    x = x + np.uint64(SPREAD)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def is_kept(seeds: Tensor, number: int, width: int, probability: float) -> Tensor:
    """What the kernels keep of rows of `width`: bool [N, width], by torch's operators."""
    key = (seeds + number).unsqueeze(1)
    keys = [key & LOW, key >> 32 & LOW]
    zero = torch.zeros_like(key)
    block = max(1 << (width - 1).bit_length(), 4)
    a = torch.arange(block // 4, device=seeds.device).unsqueeze(0)
    b = zero
    c = zero
    d = zero
    for _ in range(ROUNDS):
        first, third = a * FACTORS[0], c * FACTORS[1]  # 64 bits, of which int64 has the sign
        a = third >> 32 & LOW ^ b ^ keys[0]
        b = third & LOW
        c = first >> 32 & LOW ^ d ^ keys[1]
        d = first & LOW
        keys = [(key + step) & LOW for key, step in zip(keys, WEYL, strict=True)]
    drawn = torch.stack([a, b, c, d], dim=2).flatten(1)[:, :width]
    # To [0, 1) as Triton does it: of a negative number the complement.
    signed = torch.where(drawn > LOW >> 1, LOW - drawn, drawn)
    return signed.float() * 4.6566127342e-10 >= probability
