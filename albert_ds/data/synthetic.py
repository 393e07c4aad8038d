"""Batches that need no corpus: full rows of random ids, for measuring speed and nothing else."""

from collections.abc import Iterator

import numpy as np

from albert_ds.data.samples import MicroBatch, Sample, StreamConfig, collate
from albert_ds.data.vocab import NUM_FIXED


def synthetic_batches(
    config: StreamConfig, *, vocab_size: int, micro_batch_size: int, seed: int
) -> Iterator[MicroBatch]:
    """Endless micro-batches of rows of `sequence_length` tokens, none of them padding."""
    rng = np.random.default_rng(seed)
    length = config.sequence_length
    masked = max(1, round(config.masked_fraction * length))
    while True:
        samples = [
            Sample(
                ids=rng.integers(NUM_FIXED, vocab_size, length),
                first=length // 2,
                positions=np.sort(rng.choice(length, masked, replace=False)),
                labels=rng.integers(NUM_FIXED, vocab_size, masked),
                pair_label=int(rng.integers(2)),
                used=length,
                available=length,
            )
            for _ in range(micro_batch_size)
        ]
        yield collate(samples, [0] * len(samples), config.objective)
