"""Random numbers that are right in every layout.

Every step starts from seeds that are a function of (seed, step, data-parallel rank), so there is no
generator state to save: resuming at a step, in any layout, is the same as having run up to it.
Tensor-parallel peers share that stream, because dropout on replicated activations must agree.
Dropout on sharded activations (the probabilities of this rank's heads) must differ: `PerRankRandom`
draws a seed from the common stream, which moves it alike on all peers, and adds the rank.

Activation checkpointing replays the common stream, and with it, for free, the per-rank one.
"""

import numpy as np
import torch
from torch import nn

SEED_RANGE = 2**62  # seeds fit a signed 64-bit integer, and so does seed + rank


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Seed torch's generators for one optimizer step of one data-parallel rank."""
    mixed = np.random.SeedSequence([seed, step, dp_rank]).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(mixed) % SEED_RANGE)


class PerRankRandom(nn.Module):
    """Run a parameterless module on random numbers of this tensor-parallel rank's own."""

    def __init__(self, module: nn.Module, tp_rank: int):
        super().__init__()
        assert not list(module.parameters())
        self.module, self.tp_rank = module, tp_rank

    def forward(self, *args):
        if not self.training:
            return self.module(*args)
        # From the host's generator, so that no device has to be waited for.
        seed = int(torch.randint(SEED_RANGE, ())) + self.tp_rank
        devices = [args[0].device] if args[0].is_cuda else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            return self.module(*args)
