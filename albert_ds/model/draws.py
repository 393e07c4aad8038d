"""Where dropout takes its random numbers from, so that no layout changes them.

A row's numbers are a function of its seed and of the site that asks for them. The seed of a token
is one of the run's seed, the sample's place in the stream and the token's place in the sample
(`data/micro_batch.py`), whatever else is in the micro-batch and on whichever rank it is. It lies on
the device, so no launch holds a number of one step.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SPREAD = 0x9E3779B97F4A7C15  # golden ratio x 2^64: what sites add to a seed is far apart
# Philox (Salmon et al. 2011), as Triton and torch have it on CUDA.
FACTORS, WEYL, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draws:
    """The seeds of some rows, int64 [N], and the site that draws."""

    seeds: Tensor
    site: int = 0

    def at(self, site: int) -> "Draws":
        return replace(self, site=site)

    def of(self, rows: Tensor) -> "Draws":
        """Those of rows by index, int64 [R]."""
        return replace(self, seeds=self.seeds.index_select(0, rows))

    def on_device(self) -> tuple[Tensor, int]:
        """What a kernel takes: it adds the number to each seed."""
        return self.seeds, (self.site + 1) * SPREAD % 2**63


def is_kept(draws: Draws, width: int, probability: float) -> Tensor:
    """What the kernels keep of rows of `width`: bool [N, width], by torch's operators."""
    seeds, site = draws.on_device()
    key = (seeds + site).unsqueeze(1)
    keys = [key & LOW, key >> 32 & LOW]
    zero = torch.zeros_like(key)
    block = max(1 << (width - 1).bit_length(), 4)
    a, b, c, d = torch.arange(block // 4, device=seeds.device).unsqueeze(0), zero, zero, zero
    for _ in range(ROUNDS):
        first, third = a * FACTORS[0], c * FACTORS[1]  # 64 bits, of which int64 has the sign
        a, b, c, d = (
            third >> 32 & LOW ^ b ^ keys[0],
            third & LOW,
            first >> 32 & LOW ^ d ^ keys[1],
            first & LOW,
        )
        keys = [(key + step) & LOW for key, step in zip(keys, WEYL, strict=True)]
    drawn = torch.stack([a, b, c, d], dim=2).flatten(1)[:, :width]
    # To [0, 1) as Triton does it: of a negative number the complement.
    signed = torch.where(drawn > LOW >> 1, LOW - drawn, drawn)
    return signed.float() * 4.6566127342e-10 >= probability
