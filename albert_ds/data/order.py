"""Which sequence stands at which position of the endless stream: arithmetic, no state.

    position -> (source, its local position)    in blocks that mix the sources by weight
    local position -> (epoch, shard, sample)    shards permuted by (seed, epoch), taken in rounds
                                                of 8 that are interleaved; the samples of each
                                                permuted by (seed, epoch, shard)

So a run can go on at any position without reading what was before it, any number of processes
sees the same stream, and a process that needs every n-th position needs few shards at a time.
"""

import math
from bisect import bisect
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from albert_ds.errors import UserError

ROUND_SHARDS = 8  # interleaved, and in memory, at a time
BLOCK_SAMPLES = 10_000  # weights are exact within each block of so many positions

# What is drawn, so that no two purposes share random numbers.
SHARD_ORDER, SAMPLE_ORDER, SOURCE_ORDER, SAMPLE_DRAWS = range(4)


class Draws:
    """The random numbers of one purpose: every place has its own, at a tenth of a new generator.

    Philox is a function of (key, counter): the seed and the purpose are the key, the place is the
    upper part of the counter, and the lower 64 bits count what is drawn there.
    """

    def __init__(self, purpose: int, seed: int):
        self._philox = np.random.Philox(key=[seed, purpose])
        self._generator = np.random.Generator(self._philox)
        self._state = self._philox.state

    def at(self, *place: int) -> np.random.Generator:
        """The generator at the start of a place of up to three numbers; valid until the next."""
        self._state["state"]["counter"][:] = (0, *place, *[0] * (3 - len(place)))
        self._philox.state = self._state
        return self._generator


class Place(NamedTuple):
    """Where a position of one source lies."""

    epoch: int
    shard: int
    sample: int  # its number in the shard
    number: int  # its number in the source


class ShardOrder:
    """The stream of source number `source`, whose shards hold `sizes` samples."""

    def __init__(self, sizes: np.ndarray, seed: int, source: int):
        self._sizes = sizes
        self._firsts = np.cumsum(sizes) - sizes  # number in the source of each shard's sample 0
        self._total = int(sizes.sum())
        self._source = source
        self._shard_draws = Draws(SHARD_ORDER, seed)
        self._sample_draws = Draws(SAMPLE_ORDER, seed)
        self._epoch = self._round = -1  # whose tables are at hand

    @property
    def shards_at_hand(self) -> list[int]:
        """The shards of the round that was located last."""
        return self._rounds[self._round]

    def locate(self, position: int) -> Place:
        epoch, index = divmod(position, self._total)
        if epoch != self._epoch:
            self._begin_epoch(epoch)
        number = bisect(self._round_ends, index)
        if number != self._round:
            self._begin_round(number)
        first = self._round_ends[number] - len(self._samples)
        shard, sample = self._samples[index - first].tolist()
        return Place(epoch, shard, sample, int(self._firsts[shard]) + sample)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._round = epoch, -1
        shards = self._shard_draws.at(self._source, epoch).permutation(len(self._sizes))
        self._rounds = [
            shards[i : i + ROUND_SHARDS].tolist() for i in range(0, len(shards), ROUND_SHARDS)
        ]
        sizes = (int(self._sizes[shards].sum()) for shards in self._rounds)
        self._round_ends = list(accumulate(sizes))

    def _begin_round(self, number: int) -> None:
        """Table [samples of the round, 2] of (shard, sample): a sample of each shard in turn."""
        self._round = number
        shards = self._rounds[number]
        samples = [
            self._sample_draws.at(self._source, self._epoch, shard).permutation(self._sizes[shard])
            for shard in shards
        ]
        turns = np.concatenate([np.arange(len(s)) for s in samples])
        owners = np.repeat(shards, [len(s) for s in samples])
        table = np.stack([owners, np.concatenate(samples)], axis=1)
        self._samples = table[np.argsort(turns, kind="stable")]


class SourceOrder:
    """Which source each position of a mixture comes from, in exact proportions block by block."""

    def __init__(self, weights: list[float], seed: int):
        self._quotas = count_quotas(weights)
        self._draws = Draws(SOURCE_ORDER, seed)
        self._block = -1

    def locate(self, position: int) -> tuple[int, int]:
        """(source, its local position)."""
        block, offset = divmod(position, BLOCK_SAMPLES)
        if block != self._block:
            self._begin_block(block)
        return int(self._sources[offset]), int(self._locals[offset])

    def _begin_block(self, block: int) -> None:
        self._block = block
        sources = np.repeat(np.arange(len(self._quotas)), self._quotas)
        self._sources = self._draws.at(block).permutation(sources)
        self._locals = np.empty(BLOCK_SAMPLES, np.int64)
        for source, quota in enumerate(self._quotas):
            self._locals[self._sources == source] = block * quota + np.arange(quota)


def count_quotas(weights: list[float]) -> list[int]:
    """Samples of each source in a block: the weights' shares, rounded to sum to a block."""
    total = math.fsum(weights)
    if not all(0 < weight < math.inf for weight in weights):
        raise UserError(f"--data-weights {weights}: every weight must be a positive number")
    shares = [weight / total * BLOCK_SAMPLES for weight in weights]
    quotas = [int(share) for share in shares]
    remainders = [share - quota for share, quota in zip(shares, quotas, strict=True)]
    for source in sorted(range(len(shares)), key=lambda s: -remainders[s]):
        quotas[source] += sum(quotas) < BLOCK_SAMPLES
    if not all(quotas):
        raise UserError(f"--data-weights {weights}: no share may be under 1 in {BLOCK_SAMPLES}")
    return quotas
