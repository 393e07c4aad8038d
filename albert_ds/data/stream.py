"""The endless stream of training samples, and the finite one of held-out samples.

    positions of this rank -> ranges of a micro-batch -> (every W-th to each of W workers) ->
    sequence from its shard -> pair of segments -> masked -> concatenated

The stages are a WebDataset pipeline, over records that are found by position instead of read in the
order they lie in: so the stream can go on anywhere, which WebDataset's own cannot.
The position in the stream is one integer, the number of samples before it. What a sample looks
like is drawn from (seed, source, epoch, its number there) and depends on nothing else, so neither
the number of ranks or workers nor a stop in between changes a sample.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from albert_ds.data.order import SAMPLE_DRAWS, Draws, Place, ShardOrder, SourceOrder
from albert_ds.data.records import Sequence
from albert_ds.data.samples import MicroBatch, Sample, StreamConfig, collate, draw_sample
from albert_ds.data.shards import Shard, ShardSet
from albert_ds.data.words import build_word_starts
from albert_ds.errors import ENDINGS, UserError


def training_batches(
    sources: list[ShardSet],
    weights: list[float] | None,
    config: StreamConfig,
    *,
    start: int,
    batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int = 0,
) -> Iterator[MicroBatch]:
    """The micro-batches of one data-parallel rank from position `start` on, without end.

    Each step of `batch_size` samples gives every rank batch_size / dp_size of them, in
    micro-batches of `micro_batch_size`. `weights` are the shares of the sources, None for shares
    by size. Raises UserError for numbers that do not divide, DamagedData for a shard.
    """
    if start < 0 or start % batch_size:
        raise UserError(f"start {start}: must be a multiple of the batch size {batch_size}")
    if batch_size % (dp_size * micro_batch_size):
        raise UserError(
            f"--batch-size {batch_size}: must be a multiple of --micro-batch-size "
            f"{micro_batch_size} times {dp_size} data-parallel ranks"
        )
    reader = MicroBatchReader(sources, weights, config)
    plan = functools.partial(plan_training, start, batch_size, micro_batch_size, dp_rank, dp_size)
    from webdataset.compat import WebLoader
    from webdataset.pipeline import DataPipeline
    from webdataset.shardlists import split_by_worker

    pipeline = DataPipeline(plan, split_by_worker, reader.read_each)
    if not num_workers:
        return iter(pipeline)
    pipeline.append(_carry_endings)
    from albert_ds.data.workers import end_with_the_trainer

    loader = WebLoader(
        pipeline,
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=end_with_the_trainer,
    )
    return _raise_endings(loader)


def heldout_batches(
    source: ShardSet,
    config: StreamConfig,
    *,
    limit: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
) -> Iterator[MicroBatch]:
    """One rank's part of the first `limit` samples of a split: the same masks at every call.

    Every rank is given the same number of micro-batches; one that has run out of samples is given
    dummies, with `samples` 0.
    """
    reader = MicroBatchReader([source], None, config)
    samples = min(limit, int(source.sizes.sum()))
    mine = range(dp_rank, samples, dp_size)
    most = len(range(0, samples, dp_size))  # what rank 0 has
    for begin in range(0, most, micro_batch_size):
        yield reader.read(mine[begin : begin + micro_batch_size])


def plan_training(
    start: int, batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[range]:
    """The positions of each micro-batch of one rank: every dp_size-th of a step."""
    for begin in itertools.count(start, batch_size):
        mine = range(begin + dp_rank, begin + batch_size, dp_size)
        for i in range(0, len(mine), micro_batch_size):
            yield mine[i : i + micro_batch_size]


def _carry_endings(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch | Exception]:
    """In a worker: hand what ends the run over; a loader would add a traceback to its line."""
    try:
        yield from batches
    except ENDINGS as ending:
        yield ending


def _raise_endings(batches: Iterable[MicroBatch | Exception]) -> Iterator[MicroBatch]:
    for batch in batches:
        if isinstance(batch, Exception):
            raise batch
        yield batch


class MicroBatchReader:
    """Makes the micro-batch of any positions of the stream."""

    def __init__(self, sources: list[ShardSet], weights: list[float] | None, config: StreamConfig):
        _check_sources(sources, config)
        if weights is None:
            weights = [float(source.sizes.sum()) for source in sources]
        if len(weights) != len(sources):
            raise UserError(f"--data-weights: {len(weights)} weights for {len(sources)} of --data")
        self._mixture = SourceOrder(list(weights), config.seed)
        self._sources = [
            _SourceReader(source, number, config.seed) for number, source in enumerate(sources)
        ]
        self.word_starts = build_word_starts(sources[0].vocab.pieces, config.word_boundaries)
        self._draws = Draws(SAMPLE_DRAWS, config.seed)
        self._config = config

    def read(self, positions: range) -> MicroBatch:
        """The samples at `positions` of the stream, all drawn anew."""
        samples = [self._draw(position) for position in positions]
        return collate(samples, list(positions), self._config.objective)

    def read_each(self, ranges: Iterable[range]) -> Iterator[MicroBatch]:
        return map(self.read, ranges)

    def _draw(self, position: int) -> Sample:
        number, local = self._mixture.locate(position)
        place, shard = self._sources[number].find(local)
        sequence = shard[place.sample]
        rng = self._draws.at(number, place.epoch, place.number)

        def draw_other() -> Sequence | None:
            others = np.flatnonzero(shard.documents != sequence.document)
            return shard[int(others[rng.integers(len(others))])] if len(others) else None

        return draw_sample(sequence, self._config, self.word_starts, draw_other, rng)


class _SourceReader:
    """One source, and in memory those shards of the round at hand that were needed so far."""

    def __init__(self, source: ShardSet, number: int, seed: int):
        self._source = source
        self._order = ShardOrder(source.sizes, seed, number)
        self._loaded: dict[int, Shard] = {}

    def find(self, position: int) -> tuple[Place, Shard]:
        """Where a local position lies, and the shard that holds it."""
        place = self._order.locate(position)
        if place.shard not in self._loaded:
            at_hand = self._order.shards_at_hand
            self._loaded = {n: shard for n, shard in self._loaded.items() if n in at_hand}
            self._loaded[place.shard] = Shard(self._source, place.shard)
        return place, self._loaded[place.shard]


def _check_sources(sources: list[ShardSet], config: StreamConfig) -> None:
    for source in sources:
        if source.vocab.sha256 != sources[0].vocab.sha256:
            raise UserError(
                f"--data {source.folder}: its vocabulary is not that of {sources[0].folder}"
            )
        if config.sequence_length > source.sequence_length:
            raise UserError(
                f"--sequence-length {config.sequence_length}: the sequences of {source.folder} "
                f"have at most {source.sequence_length} tokens"
            )
