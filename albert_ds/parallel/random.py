"""Random numbers that are correct in every layout.

Every step seeds the generators with a function of (seed, step, data-parallel rank), so a checkpoint
needs no generator state. Tensor-parallel peers use the same seeds, because dropout on replicated
activations must agree. Dropout on sharded activations (the attention probabilities of this rank's
heads) must differ: `PerRankRandom` draws a seed from the common generator, which advances it
equally on all peers, and adds the rank.

Activation checkpointing replays the common generator and so the per-rank seeds too.
"""

import numpy as np
import torch
from torch import nn

SEED_RANGE = 2**62  # seeds fit a signed 64-bit integer, and so does seed + rank


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Seed torch's generators for one optimizer step of one data-parallel rank."""
    mixed = np.random.SeedSequence([seed, step, dp_rank]).generate_state(1, np.uint64)[0]
    # torch.manual_seed formats stack traces for devices that do not exist: 2 ms a step.
    torch.default_generator.manual_seed(int(mixed) % SEED_RANGE)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(int(mixed) % SEED_RANGE)


class PerRankRandom(nn.Module):
    """Run a module without parameters on random numbers that differ between peers."""

    def __init__(self, module: nn.Module, tp_rank: int):
        super().__init__()
        assert not list(module.parameters())
        self.module, self.tp_rank = module, tp_rank

    def forward(self, *args):
        if not self.training or not args[0].is_cuda:
            return self.module(*args)
        # The host's generator: no wait for a device.
        seed = int(torch.randint(SEED_RANGE, ())) + self.tp_rank
        with torch.random.fork_rng(devices=[args[0].device]):
            torch.manual_seed(seed)
            return self.module(*args)
