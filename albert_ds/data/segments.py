"""From sentences to sequences, and from a sequence to a pair of segments (paper Sec. 3.1, 4.1).

When shards are built, the sentences of a document are packed into sequences. Each time a sequence
is read, its window, split point, order and partner are drawn anew. Nothing here keeps state but
`SentenceRuns`, an index of one shard.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from albert_ds.base.plugin import Table
from albert_ds.data.shards import Sequence

NO_LABEL = -100  # ignored in loss and accuracy
PACKINGS = ("whole", "full")


class Pair(NamedTuple):
    first: np.ndarray  # token ids of segment A
    second: np.ndarray  # of segment B; empty if the window is a single sentence
    label: int  # 0 in order, 1 swapped (sop) or from another document (nsp), NO_LABEL
    used: int  # tokens of both segments


def pack_sentences(
    sentences: Iterable[list[int]], capacity: int, packing: str = "whole"
) -> Iterator[tuple[list[int], list[int]]]:
    """Pack the sentences of a document greedily into sequences (ids, ends).

    whole   At most `capacity` tokens: a sentence that does not fit starts the next sequence.
    full    At least `capacity` tokens: the sentence that reaches `capacity` is the last one.
            The document's last sequence may be shorter.

    A sentence longer than `capacity` is first cut into pieces of at most `capacity` tokens.
    """
    assert packing in PACKINGS
    ids: list[int] = []
    ends: list[int] = []
    for sentence in sentences:
        for begin in range(0, len(sentence), capacity):
            piece = sentence[begin : begin + capacity]
            held = len(ids) + (len(piece) if packing == "whole" else 1)
            if ids and held > capacity:
                yield ids, ends
                ids, ends = [], []
            ids.extend(piece)
            ends.append(len(ids))
    if ids:
        yield ids, ends


def draw_target(capacity: int, short_fraction: float, rng: np.random.Generator) -> int:
    """The number of tokens for a pair: mostly `capacity`, else uniform in 2..capacity."""
    short = rng.random() < short_fraction
    return int(rng.integers(2, capacity, endpoint=True)) if short else capacity


def draw_window(ends: np.ndarray, target: int, rng: np.random.Generator) -> tuple[int, int]:
    """Sentences [i, j): from a random i on, the fewest that hold `target` tokens.

    i is uniform over the sentences after which `target` tokens are left, counting their own; it is
    0 if the sequence has fewer tokens.
    """
    spare = int(ends[-1]) - target
    if spare <= 0:
        return 0, len(ends)
    i = int(rng.integers(ends.searchsorted(spare, side="right") + 1))
    begin = int(ends[i - 1]) if i else 0
    return i, int(ends.searchsorted(begin + target)) + 1


class SentenceRuns:
    """Finds runs of whole sentences by their number of tokens, among all sequences of a shard.

    No run begins with the first sentence of its sequence, as no second segment does: that one is
    often a title, which would tell the two apart.
    """

    def __init__(self, sequences: Iterable[Sequence]):
        starts, stops, owners, documents, ends, firsts = [], [], [], [], [], []
        total = 0  # tokens of all sequences so far; every place below counts them
        for number, sequence in enumerate(sequences):
            firsts.append(total)
            places = total + sequence.ends.astype(np.int64)
            total = int(places[-1])
            ends.append(places)
            starts.append(places[:-1])
            stops.append(np.full(len(places) - 1, total))
            owners.append(np.full(len(places) - 1, number))
            documents.append(np.full(len(places) - 1, sequence.document, np.uint64))
        self._firsts = firsts
        self._ends = np.concatenate(ends)
        self._is_end = np.zeros(total + 1, bool)
        self._is_end[self._ends] = True
        self._starts = np.concatenate(starts)
        self._stops = np.concatenate(stops)  # where the sequence of each start ends
        self._owners = np.concatenate(owners)
        self._documents = np.concatenate(documents)

    def find(
        self, length: int, document: int, rng: np.random.Generator
    ) -> tuple[int, int, int] | None:
        """(sequence, begin, end) of a run of `length` tokens outside `document`, drawn at random.

        If there is none, a run whose length is the nearest; None if there is no other
        document with two sentences in a sequence.
        """
        count = len(self._starts)
        if not count:
            return None
        offset = int(rng.integers(count))
        begin = 0
        size = 512
        while begin < count:  # mostly the first few hundred starts hold one
            runs = (offset + np.arange(begin, min(begin + size, count))) % count
            stops = self._starts[runs] + length
            fits = (stops <= self._stops[runs]) & (self._documents[runs] != document)
            fits[fits] = self._is_end[stops[fits]]
            if fits.any():
                return self._place(int(runs[fits.argmax()]), length)
            begin += size
            size = 8 * size
        return self._find_nearest(length, document, offset)

    def _find_nearest(self, length: int, document: int, offset: int) -> tuple[int, int, int] | None:
        runs = (offset + np.arange(len(self._starts))) % len(self._starts)
        runs = runs[self._documents[runs] != document]
        if not len(runs):
            return None
        starts = self._starts[runs]
        last = self._stops[runs]
        above = self._ends.searchsorted(np.minimum(starts + length, last))
        longer = self._ends[above] - starts
        shorter = self._ends[above - 1] - starts
        lengths = np.where(
            (shorter > 0) & (length - shorter < abs(longer - length)), shorter, longer
        )
        best = int(abs(lengths - length).argmin())
        return self._place(int(runs[best]), int(lengths[best]))

    def _place(self, run: int, length: int) -> tuple[int, int, int]:
        number = int(self._owners[run])
        begin = int(self._starts[run] - self._firsts[number])
        return number, begin, begin + length


DrawOther = Callable[[int], np.ndarray | None]
Labelled = tuple[np.ndarray, np.ndarray, int]


def _keep(first: np.ndarray, second: np.ndarray, draw_other, rng) -> Labelled:
    return first, second, NO_LABEL


def _swap(first: np.ndarray, second: np.ndarray, draw_other, rng) -> Labelled:
    """Swap the segments with probability 0.5."""
    label = int(rng.random() < 0.5)
    return (second, first, label) if label else (first, second, label)


def _replace(first: np.ndarray, second: np.ndarray, draw_other: DrawOther, rng) -> Labelled:
    """Replace the second with probability 0.5 by what `draw_other` draws for its length.

    That is whole sentences of another document, as many tokens or the nearest number; None without
    another document. Where the lengths differ, both candidates are cut at their end to one length
    below both; so the lengths and cuts of a pair never depend on its label.
    """
    other = draw_other(len(second))
    if other is None:
        return first, second, NO_LABEL
    label = int(rng.random() < 0.5)
    length = len(second)
    if len(other) != length:
        length = max(1, min(len(other), length) - 1)
    return first, (other if label else second)[:length], label


# Objective -> (first, second, draw_other, rng) -> two segments and their label.
DRAWS = Table(Callable) | {"sop": _swap, "nsp": _replace, "none": _keep}


def draw_pair(
    sequence: Sequence, target: int, objective: str, draw_other: DrawOther, rng: np.random.Generator
) -> Pair:
    """Draw a window of `target` tokens and make two segments of it, labelled by `DRAWS`.

    A single sentence makes no pair: no label.
    """
    ids = sequence.ids
    ends = sequence.ends
    i, j = draw_window(ends, target, rng)
    begin = int(ends[i - 1]) if i else 0
    end = int(ends[j - 1])
    target = min(target, end - begin)
    if j - i == 1:
        whole = _cut(ids[begin:end], end - begin - target, rng)
        return Pair(whole, whole[:0], NO_LABEL, target)
    split = int(ends[rng.integers(i, j - 1)])
    first, second = ids[begin:split], ids[split:end]
    first, second, label = DRAWS[objective](first, second, draw_other, rng)
    first, second = truncate_pair(first, second, target, rng)
    return Pair(first, second, label, len(first) + len(second))


def truncate_pair(
    first: np.ndarray, second: np.ndarray, target: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Take single tokens off the longer segment, front or back at random, down to `target`."""
    kept_first, kept_second = cut_pair(len(first), len(second), target)
    first = _cut(first, len(first) - kept_first, rng)
    return first, _cut(second, len(second) - kept_second, rng)


def cut_pair(first: int, second: int, target: int) -> tuple[int, int]:
    """Tokens left of two segments when the longer one loses a token until `target` are left.

    The loop of BERT and ALBERT in closed form: of two equally long segments the second loses one.
    """
    excess = first + second - target
    if excess <= 0:
        return first, second
    lead = first - second  # what the longer one loses before they take turns
    turns = max(0, excess - abs(lead))
    from_first = turns // 2 + (min(excess, lead) if lead > 0 else 0)
    return first - from_first, second - (excess - from_first)


def _cut(segment: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Drop `number` tokens, each from the front or the back with probability 0.5."""
    if not number:
        return segment
    front = int(rng.binomial(number, 0.5))
    return segment[front : len(segment) - number + front]
