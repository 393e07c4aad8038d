"""From sentences to sequences, and from a sequence to a pair of segments (paper Sec. 3.1, 4.1).

When shards are built, the sentences of a document are packed into sequences. Whenever a sequence
is read, its window, split point, order and partner are drawn anew. Pure functions.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from albert_ds.data.records import Sequence

NO_LABEL = -100  # ignored in loss and accuracy
OBJECTIVES = ("sop", "nsp", "none")


class Pair(NamedTuple):
    first: np.ndarray  # token ids of segment A
    second: np.ndarray  # of segment B; empty where the window is a single sentence
    label: int  # 0 in order, 1 swapped (sop) or from another document (nsp), NO_LABEL
    used: int  # tokens of the stored sequence that were drawn


def pack_sentences(
    sentences: Iterable[list[int]], capacity: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Pack whole sentences greedily into (ids, ends) of at most `capacity` tokens each.

    One that does not fit starts the next sequence; one longer than `capacity` is cut into pieces.
    """
    ids: list[int] = []
    ends: list[int] = []
    for sentence in sentences:
        for begin in range(0, len(sentence), capacity):
            piece = sentence[begin : begin + capacity]
            if len(ids) + len(piece) > capacity:
                yield ids, ends
                ids, ends = [], []
            ids.extend(piece)
            ends.append(len(ids))
    if ids:
        yield ids, ends


def draw_target(capacity: int, short_fraction: float, rng: np.random.Generator) -> int:
    """The number of tokens a pair is to have: mostly `capacity`, else uniform in 2..capacity."""
    short = rng.random() < short_fraction
    return int(rng.integers(2, capacity, endpoint=True)) if short else capacity


def draw_window(ends: np.ndarray, target: int, rng: np.random.Generator) -> tuple[int, int]:
    """Sentences [i, j): the fewest from a random i on that hold `target` tokens.

    i is uniform over the sentences from which that many are left (0 where there are too few).
    """
    spare = int(ends[-1]) - target
    if spare <= 0:
        return 0, len(ends)
    i = int(rng.integers(ends.searchsorted(spare, side="right") + 1))
    begin = int(ends[i - 1]) if i else 0
    return i, int(ends.searchsorted(begin + target)) + 1


def draw_pair(
    sequence: Sequence,
    target: int,
    objective: str,
    draw_other: Callable[[], Sequence | None],
    rng: np.random.Generator,
) -> Pair:
    """Draw a window of `target` tokens and make two segments of it.

    sop swaps them with probability 0.5, nsp takes the second from the document of `draw_other`
    with probability 0.5, none leaves them as they are. A single sentence has no pair: no label.
    """
    ids, ends = sequence.ids, sequence.ends
    i, j = draw_window(ends, target, rng)
    begin, end = int(ends[i - 1]) if i else 0, int(ends[j - 1])
    target = min(target, end - begin)
    if j - i == 1:
        whole = _cut(ids[begin:end], end - begin - target, rng)
        return Pair(whole, whole[:0], NO_LABEL, target)
    split = int(ends[rng.integers(i, j - 1)])
    first, second, label = ids[begin:split], ids[split:end], NO_LABEL
    if objective != "none":
        label = int(rng.random() < 0.5)
        if label and objective == "sop":
            first, second = second, first
        elif label:
            other = draw_other()
            if other is None:
                label = NO_LABEL
            else:
                second = _draw_text(other, max(1, target - len(first)), rng)
    first, second = truncate_pair(first, second, target, rng)
    return Pair(first, second, label, target)


def truncate_pair(
    first: np.ndarray, second: np.ndarray, target: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Take single tokens off the longer segment, at its front or back alike, down to `target`.

    The release's loop in closed form: of two equally long segments it is the second's turn.
    """
    excess = len(first) + len(second) - target
    if excess <= 0:
        return first, second
    lead = len(first) - len(second)  # what the longer one loses before they take turns
    turns = max(0, excess - abs(lead))
    from_first = turns // 2 + (min(excess, lead) if lead > 0 else 0)
    return _cut(first, from_first, rng), _cut(second, excess - from_first, rng)


def _cut(segment: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Drop `number` tokens, each from the front or the back with probability 0.5."""
    if not number:
        return segment
    front = int(rng.binomial(number, 0.5))
    return segment[front : len(segment) - number + front]


def _draw_text(sequence: Sequence, target: int, rng: np.random.Generator) -> np.ndarray:
    i, j = draw_window(sequence.ends, target, rng)
    return sequence.ids[(int(sequence.ends[i - 1]) if i else 0) : int(sequence.ends[j - 1])]
