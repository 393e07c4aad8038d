"""A data set as the report shows it: index.json, how samples look, what guessing gives."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.storage import is_url
from albert_ds.commands.inspect import Statistics
from albert_ds.data.samples import SampleReader
from albert_ds.data.shards import Shard, ShardSet, open_shards, read_index
from albert_ds.data.stream_config import DataPlan, StreamConfig
from albert_lab.report.chart import Chart, Line, Point

SAMPLES = 1000  # drawn for the pictures
MOST_SHARDS = 4  # whose pieces are counted
MOST_HELDOUT = 4096  # samples, whose masked tokens are guessed


class Data(NamedTuple):
    """A DATA folder as a run names it, and what it held then."""

    folder: str
    sha256: str = ""  # of its content; "" where it is not recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Unigram:
    """What guessing by the frequencies of pieces reaches on the held-out masked tokens."""

    piece: str  # the one that is masked most often
    share: float  # of it: the accuracy of always guessing it
    loss: float  # cross entropy in nats, with the frequencies of the training tokens
    masked: int  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A DATA folder. Without `index` it could not be read, and `notes` says why."""

    folder: str
    index: dict
    unigram: Unigram | None
    pictures: list[Chart]
    notes: list[str]


def read_corpus(data: Data, config: dict, eval_samples: int) -> Corpus:
    """`config` is config.json of a run that reads this folder; its last step's draws are shown."""
    index = {}
    unigram = None
    pictures = []
    notes = []
    folder = data.folder
    try:
        if is_url(folder):
            raise UserError(f"{folder}: is not on this machine; its baselines are left out")
        train = open_shards(folder, "train")
        if data.sha256 not in ("", train.fingerprint):
            raise UserError(f"{folder}: holds other data than the run has read")
        index = read_index(folder)
        plan = DataPlan.read(config, folder)
        stream = plan.stream_at(plan.steps)
        pictures = draw_pictures(look_at(train, stream), stream)
        if index["splits"]["heldout"]["samples"]:
            held = open_shards(folder, "heldout")
            unigram = guess(draw_labels(held, stream, eval_samples), train)
    except (UserError, DamagedData, OSError) as error:
        notes.append(str(error))
    return Corpus(folder=folder, index=index, unigram=unigram, pictures=pictures, notes=notes)


def draw_labels(source: ShardSet, stream: StreamConfig, limit: int) -> np.ndarray:
    """The first masked tokens that the held-out evaluation of a run predicts, int64 [masked]."""
    reader = SampleReader([source], None, stream)
    count = min(limit, MOST_HELDOUT, int(source.sizes.sum()))
    return np.concatenate([reader.draw(position).labels for position in range(count)])


def guess(labels: np.ndarray, train: ShardSet) -> Unigram:
    size = train.vocab.size
    counts = count_pieces(train) + 1.0  # a piece that never occurs still gets a probability
    seen = np.bincount(labels, minlength=size)
    most = int(seen.argmax())
    return Unigram(
        piece=train.vocab.pieces[most],
        share=float(seen[most] / len(labels)),
        loss=float(-np.log(counts / counts.sum())[labels].mean()),
        masked=len(labels),
    )


def count_pieces(train: ShardSet) -> np.ndarray:
    """Occurrences of every piece in the first shards, int64 [V]."""
    size = train.vocab.size
    total = np.zeros(size, np.int64)
    for number in range(min(MOST_SHARDS, len(train.shards))):
        shard = Shard(train, number)
        ids = np.concatenate([shard[i].ids for i in range(len(shard))]).astype(np.int64)
        total += np.bincount(ids % size, minlength=size)  # segmented sets add the size to some ids
    return total


def look_at(train: ShardSet, stream: StreamConfig) -> Statistics:
    """Counts over the first samples that a training reads."""
    reader = SampleReader([train], None, stream)
    seen = Statistics()
    for position in range(min(SAMPLES, int(train.sizes.sum()))):
        seen.add(reader.draw(position))
    return seen


def draw_pictures(seen: Statistics, stream: StreamConfig) -> list[Chart]:
    """The distributions of the counts of `albert-ds inspect`."""
    runs = dict(sorted(seen.runs.items()))
    width = max(1, math.ceil(stream.sequence_length / 32))
    lengths = Counter(length // width * width for length in seen.lengths)
    shares = Counter(math.floor(100 * share) for share in seen.masked_shares)
    ranked = sorted(seen.ids.values(), reverse=True)
    places = sorted({round(10 ** (n / 20)) for n in range(20 * len(str(len(ranked))))})
    points = [Point(r, ranked[r - 1], 0, 0) for r in places if r <= len(ranked)]
    frequency = Line(run=0, name="", points=points, is_main=False)
    return [
        _histogram(lengths, width, "Length of a sample", "samples", "tokens"),
        _histogram(shares, 1, "Masked share of a sample", "samples", "masked tokens, %"),
        _histogram(runs, 1, "Words of a masked stretch", "stretches", "words", shift=-0.5),
        Chart(
            title="Frequency of pieces",
            unit="occurrences",
            lines=[frequency],
            x_title="rank of the piece",
            x_is_log=True,
            may_be_log=True,
        ),
    ]


def _histogram(
    counts: dict[int, int], width: int, title: str, unit: str, x_title: str, shift: float = 0
) -> Chart:
    """Bars of `width`, each on the values from its place, moved by `shift`, up to the next."""
    points = []
    for left in range(min(counts), max(counts) + 1, width):
        points += [
            Point(x, counts.get(left, 0), 0, 0) for x in (left + shift, left + shift + width)
        ]
    line = Line(run=0, name=unit, points=points, is_area=True)
    return Chart(title=title, unit=unit, lines=[line], x_title=x_title, from_zero=True)
