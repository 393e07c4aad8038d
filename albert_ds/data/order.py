"""Which sequence stands at which position of the endless stream: arithmetic, no state.

    position -> (source, local position)        sources mixed by weight, in blocks of positions
    local position -> (epoch, shard, sample)    shards permuted by (seed, epoch), in rounds of 8
                                                that are interleaved; the samples of each shard
                                                permuted by (seed, epoch, shard)

So a run can resume at any position without reading what came before, any number of processes
sees the same stream, and a process that reads every n-th position needs few shards at a time.
"""

import math
from bisect import bisect
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from albert_ds.base.errors import UserError

ROUND_SHARDS = 8  # interleaved, and held in memory, at a time
BLOCK_SAMPLES = 10_000  # positions in a block; the weights are exact within each

# The purposes of random numbers: no two of them share any.
SHARD_ORDER, SAMPLE_ORDER, SOURCE_ORDER, SAMPLE_DRAWS = range(4)


class Draws:
    """The random numbers of one purpose: `with draws.at(1, 2, 3) as rng` starts those of a place.

    Every place has its own, in any order of visits. Philox is a function of (key, counter): seed
    and purpose are the key, the place is the upper part of the counter, and the lower 64 bits
    count what is drawn there. One generator serves all places, since a new one costs ten times as
    much; so a place must be left before the next one begins, which an assertion checks.
    """

    def __init__(self, purpose: int, seed: int):
        self._philox = np.random.Philox(key=[seed, purpose])
        self._generator = np.random.Generator(self._philox)
        self._state = self._philox.state
        self._in_use = False

    def at(self, *place: int) -> "Draws":
        """The start of a place of up to three numbers, for a `with` statement."""
        assert not self._in_use, "one place at a time"
        self._state["state"]["counter"][:] = (0, *place, *[0] * (3 - len(place)))
        self._philox.state = self._state
        return self

    def __enter__(self) -> np.random.Generator:
        self._in_use = True
        return self._generator

    def __exit__(self, *exception) -> None:
        self._in_use = False

    def permutation(self, items: int | np.ndarray, *place: int) -> np.ndarray:
        """A permutation of `items`, or of the numbers under it."""
        with self.at(*place) as rng:
            return rng.permutation(items)


class Place(NamedTuple):
    """Which sample of a source stands at a position."""

    epoch: int
    shard: int
    sample: int  # its number in the shard
    number: int  # its number in the source


class ShardOrder:
    """The order of samples in source number `source`, whose shards hold `sizes` samples."""

    def __init__(self, sizes: np.ndarray, seed: int, source: int):
        self._sizes = sizes
        self._firsts = np.cumsum(sizes) - sizes  # number in the source of each shard's sample 0
        self._total = int(sizes.sum())
        self._source = source
        self._shard_draws = Draws(SHARD_ORDER, seed)
        self._sample_draws = Draws(SAMPLE_ORDER, seed)
        self._epoch = self._round = -1  # whose tables are in memory

    @property
    def round_shards(self) -> list[int]:
        """The shards of the round of the last located position."""
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
        self._epoch = epoch
        self._round = -1
        shards = self._shard_draws.permutation(len(self._sizes), self._source, epoch)
        self._rounds = [
            shards[i : i + ROUND_SHARDS].tolist() for i in range(0, len(shards), ROUND_SHARDS)
        ]
        sizes = (int(self._sizes[shards].sum()) for shards in self._rounds)
        self._round_ends = list(accumulate(sizes))

    def _begin_round(self, number: int) -> None:
        """Make the table [samples of the round, 2] of (shard, sample): the shards take turns."""
        self._round = number
        shards = self._rounds[number]
        samples = [
            self._sample_draws.permutation(self._sizes[shard], self._source, self._epoch, shard)
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
        self._sources = self._draws.permutation(sources, block)
        self._locals = np.empty(BLOCK_SAMPLES, np.int64)
        for source, quota in enumerate(self._quotas):
            self._locals[self._sources == source] = block * quota + np.arange(quota)


def count_quotas(weights: list[float]) -> list[int]:
    """Samples of each source in a block: its share by weight, rounded so that they fill a block."""
    total = math.fsum(weights)
    shares = [weight / total * BLOCK_SAMPLES for weight in weights]
    quotas = [int(share) for share in shares]
    remainders = [share - quota for share, quota in zip(shares, quotas, strict=True)]
    for source in sorted(range(len(shares)), key=lambda s: -remainders[s]):
        quotas[source] += sum(quotas) < BLOCK_SAMPLES
    if not all(quotas):
        raise UserError(f"--data-weights {weights}: no share may be under 1 in {BLOCK_SAMPLES}")
    return quotas
