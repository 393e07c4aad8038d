"""n-gram masking of whole words (paper Sec. 3.1, eq. for p(n); details as released).

    p(n) = (1/n) / (1/1 + ... + 1/N),  N = 3:  6/11, 3/11, 2/11

Two things differ from the release on purpose: n-grams end with their segment (there they may run
across the [SEP] in the middle), and everything is drawn from the generator that is passed in
(there n comes from one that is never seeded). Pure functions.
"""

import numpy as np


def count_predictions(length: int, fraction: float, limit: int | None) -> int:
    """How many of `length` tokens, [CLS] and [SEP] among them, are to be predicted."""
    wanted = max(1, round(fraction * length))
    return wanted if limit is None else min(wanted, limit)


def draw_positions(
    starts: np.ndarray, edges: list[int], budget: int, max_ngram: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw whole-word n-grams until `budget` tokens are covered; returns their ascending indices.

    Candidates are visited in random order; n is lowered until the n-gram fits what is left of the
    budget, and one that overlaps an earlier one is skipped. So up to `budget`, and never more.

    Args:
        starts: bool [T], whether the token starts a word.
        edges: positions of [CLS] and of each [SEP], ascending; the words lie between them.
    """
    starts = starts.copy()
    starts[edges] = True
    starts[[edge + 1 for edge in edges[:-1]]] = True  # each segment starts with a word
    begins = np.flatnonzero(starts)  # [W] first token of each word, an edge being one too
    walls = np.searchsorted(begins, edges)  # the edges as word numbers
    words = np.arange(len(begins))
    room = np.repeat(walls[1:], np.diff(walls))  # words before which the segment ends
    room = np.minimum(room - words[: len(room)], max_ngram)
    room[walls[:-1]] = 0
    words = rng.permutation(np.flatnonzero(room))
    sums = np.cumsum(1 / np.arange(1, max_ngram + 1))  # sums[n-1] = 1/1 + ... + 1/n
    draws = rng.random(len(words)) * sums[room[words] - 1]  # so p(n) is renormalised to the room
    ngrams = np.searchsorted(sums, draws, side="right") + 1

    bounds = begins.tolist()
    covered = bytearray(len(bounds))
    for word, ngram in zip(words.tolist(), ngrams.tolist(), strict=True):
        size = bounds[word + ngram] - bounds[word]
        while size > budget and ngram:
            ngram -= 1
            size = bounds[word + ngram] - bounds[word]
        if ngram and covered.find(1, word, word + ngram) < 0:
            covered[word : word + ngram] = b"\1" * ngram
            budget -= size
            if not budget:
                break
    lengths = np.diff(begins, append=len(starts))
    return np.flatnonzero(np.repeat(np.frombuffer(covered, bool), lengths))


def draw_replacements(
    labels: np.ndarray, mask_id: int, vocab_size: int, rng: np.random.Generator
) -> np.ndarray:
    """What stands at the masked positions: 80 % [MASK], 10 % the token itself, 10 % any piece.

    Drawn for each token by itself, and "any" is the full vocabulary with its special pieces.
    """
    choice = rng.random(len(labels))
    anything = rng.integers(vocab_size, size=len(labels))
    return np.where(choice < 0.8, mask_id, np.where(choice < 0.9, labels, anything))
