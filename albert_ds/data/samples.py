"""From a position of the stream to a stored sequence, and from that to a masked sample.

A sample is [CLS] A [SEP] B [SEP] (paper Sec. 3.1), or [CLS] A [SEP] if its window is one sentence.
Shapes: T tokens of a sequence, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from albert_ds.base.errors import UserError
from albert_ds.data.masking import count_predictions, draw_positions, draw_replacements
from albert_ds.data.order import SAMPLE_DRAWS, Draws, Place, ShardOrder, SourceOrder
from albert_ds.data.segments import SentenceRuns, draw_pair, draw_target
from albert_ds.data.shards import Sequence, Shard, ShardSet
from albert_ds.data.stream_config import StreamConfig
from albert_ds.vocab.vocab import CLS, MASK, SEP
from albert_ds.vocab.words import build_word_starts, find_word_starts, mark_words

NUM_MARKS = 3  # [CLS] and two [SEP]


class Sample(NamedTuple):
    ids: np.ndarray  # int64 [T], masked
    first: int  # tokens of [CLS] A [SEP]
    positions: np.ndarray  # of the predicted tokens, ascending
    labels: np.ndarray  # their ids before masking
    pair_label: int
    used: int  # of the stored tokens
    available: int  # stored tokens
    starts: np.ndarray  # bool [T], whether the token starts a word, for masking
    words: int = 0  # of its text, as `mark_words` counts them


def draw_sample(
    sequence: Sequence,
    config: StreamConfig,
    word_starts: np.ndarray,
    word_marks: np.ndarray,
    draw_other: Callable[[int], np.ndarray | None],
    rng: np.random.Generator,
) -> Sample:
    """Draw window, pair and mask of one stored sequence.

    Args:
        word_starts: int8 [V] of `build_word_starts`. A segmented sequence has its own words.
        word_marks: of `mark_words`, for the ids as they are stored.
        draw_other: draws sentences of another document by their number of tokens, for nsp; see
            `draw_pair`.
    """
    target = draw_target(config.sequence_length - NUM_MARKS, config.short_fraction, rng)
    pair = draw_pair(sequence, target, config.objective, draw_other, rng)
    first = len(pair.first) + 2
    second = len(pair.second) + (len(pair.second) > 0)
    ids = np.empty(first + second, np.int64)
    ids[0] = CLS
    ids[1 : first - 1] = pair.first
    ids[first - 1] = ids[-1] = SEP
    ids[first : first + len(pair.second)] = pair.second
    words = int(word_marks[ids].sum())
    if sequence.segmented:
        starts = ids >= len(word_starts)
        ids %= len(word_starts)
    else:
        starts = find_word_starts(word_starts[ids])
    edges = [0, first - 1, len(ids) - 1] if second else [0, first - 1]
    budget = count_predictions(len(ids), config.masked_fraction, config.max_predictions)
    positions = draw_positions(starts, edges, budget, config.max_ngram, rng)
    labels = ids[positions]
    ids[positions] = draw_replacements(labels, MASK, len(word_starts), rng)
    available = len(sequence.ids)
    return Sample(ids, first, positions, labels, pair.label, pair.used, available, starts, words)


class SampleReader:
    """Draws the samples of any positions of the stream."""

    def __init__(self, sources: list[ShardSet], weights: list[float] | None, config: StreamConfig):
        assert all(source.vocab.sha256 == sources[0].vocab.sha256 for source in sources)
        for source in sources:
            if config.sequence_length > source.sequence_length:
                raise UserError(
                    f"--sequence-length {config.sequence_length}: the sequences of "
                    f"{source.folder} have at most {source.sequence_length} tokens"
                )
        if weights is None:
            weights = [float(source.sizes.sum()) for source in sources]
        self._mixture = SourceOrder(list(weights), config.seed)
        self._sources = [
            _SourceReader(source, number, config.seed) for number, source in enumerate(sources)
        ]
        self.word_starts = build_word_starts(sources[0].vocab.pieces, config.word_boundaries)
        pieces = sources[0].vocab.pieces
        self._word_marks = {s: mark_words(pieces, segmented=s) for s in (False, True)}
        self._draws = Draws(SAMPLE_DRAWS, config.seed)
        self._config = config

    def locate(self, position: int) -> tuple[int, Place, Shard]:
        """The number of the source, the place in it, and the shard of a position of the stream."""
        number, local = self._mixture.locate(position)
        return number, *self._sources[number].find(local)

    def draw(self, position: int, config: StreamConfig | None = None) -> Sample:
        """The sample at a position of the stream; `config` may have another length and masks."""
        number, place, shard = self.locate(position)
        sequence = shard[place.sample]
        with self._draws.at(number, place.epoch, place.number) as rng:

            def draw_other(length: int) -> np.ndarray | None:
                runs = self._sources[number].find_runs(place.shard)
                run = runs.find(length, sequence.document, rng)
                return run and shard[run[0]].ids[run[1] : run[2]]

            return draw_sample(
                sequence,
                config or self._config,
                self.word_starts,
                self._word_marks[sequence.segmented],
                draw_other,
                rng,
            )


class _SourceReader:
    """One source; in memory are those shards of the current round that were needed so far."""

    def __init__(self, source: ShardSet, number: int, seed: int):
        self._source = source
        self._order = ShardOrder(source.sizes, seed, number)
        self._loaded: dict[int, Shard] = {}
        self._runs: dict[int, SentenceRuns] = {}

    def find(self, position: int) -> tuple[Place, Shard]:
        """The place of a local position, and the shard that holds it."""
        place = self._order.locate(position)
        if place.shard not in self._loaded:
            current = self._order.round_shards
            for tables in (self._loaded, self._runs):
                for gone in tables.keys() - set(current):
                    del tables[gone]
            self._loaded[place.shard] = Shard(self._source, place.shard)
        return place, self._loaded[place.shard]

    def find_runs(self, number: int) -> SentenceRuns:
        """The index of a loaded shard, made when it is first needed (nsp)."""
        if number not in self._runs:
            shard = self._loaded[number]
            self._runs[number] = SentenceRuns(shard[i] for i in range(len(shard)))
        return self._runs[number]
