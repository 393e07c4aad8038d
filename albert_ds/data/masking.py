"""n-gram masking of whole words (paper Sec. 3.1, eq. for p(n); details as released).

    p(n) = (1/n) / (1/1 + ... + 1/N),  N = 3:  6/11, 3/11, 2/11

Two things differ from the release on purpose. An n-gram ends with its segment; in the release it
may continue beyond the [SEP] in the middle. Everything is drawn from the generator that is passed
in; the release draws n from a generator that is never seeded. Pure functions.
"""

from bisect import bisect
from itertools import accumulate, chain

import numpy as np


def count_predictions(length: int, fraction: float, limit: int | None) -> int:
    """How many of `length` tokens, including [CLS] and [SEP], are to be predicted."""
    wanted = max(1, round(fraction * length))
    return wanted if limit is None else min(wanted, limit)


def draw_positions(
    starts: np.ndarray, edges: list[int], budget: int, max_ngram: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw whole-word n-grams until `budget` tokens are covered; returns their ascending indices.

    Candidates are visited in random order. n is lowered until the n-gram fits into the rest of the
    budget; an n-gram that overlaps an earlier one is skipped. Never more than `budget` tokens.

    Args:
        starts: bool [T], whether the token starts a word.
        edges: positions of [CLS] and of each [SEP], ascending; the words lie between them.
    """
    starts = starts.copy()
    for edge in edges:
        starts[edge : edge + 2] = True  # an edge counts as a word, and what follows starts one
    begins = starts.nonzero()[0]
    bounds = begins.tolist()
    bounds.append(len(starts))
    sums = list(accumulate(1 / n for n in range(1, max_ngram + 1)))
    # For each word: the sum up to the longest n-gram that fits into its segment.
    totals = sums[-1:] * len(begins)
    for wall in begins.searchsorted(edges).tolist():
        for n in range(1, min(max_ngram, wall + 1)):
            totals[wall - n] = min(totals[wall - n], sums[n - 1])
    masked = bytearray(len(starts))
    for edge in edges:
        masked[edge] = 1  # never drawn
    visits = rng.permutation(len(begins))
    draws = rng.random(len(begins))
    few = 2 * budget // 3 + 8  # mostly enough to use the budget; lists of all words take longer
    first = zip(visits[:few].tolist(), draws[:few].tolist(), strict=True)
    for word, draw in chain(first, zip(visits[few:], draws[few:], strict=True)):
        begin = bounds[word]
        if masked[begin]:
            continue
        ngram = bisect(sums, draw * totals[word]) + 1  # p(n), renormalised to the room
        while bounds[word + ngram] - begin > budget:
            ngram -= 1
        end = bounds[word + ngram]
        if ngram and masked.find(1, begin, end) < 0:
            masked[begin:end] = b"\1" * (end - begin)
            budget -= end - begin
            if not budget:
                break
    for edge in edges:
        masked[edge] = 0
    return np.frombuffer(masked, np.uint8).nonzero()[0]


def draw_replacements(
    labels: np.ndarray, mask_id: int, vocab_size: int, rng: np.random.Generator
) -> np.ndarray:
    """The model's input at the masked positions: 80 % [MASK], 10 % the token, 10 % any piece.

    Drawn for each token independently; "any" is the full vocabulary, special pieces included.
    """
    choice, anything = rng.random((2, len(labels)))
    replacements = (anything * vocab_size).astype(np.int64)
    np.copyto(replacements, labels, where=choice < 0.9)
    np.copyto(replacements, mask_id, where=choice < 0.8)
    return replacements
