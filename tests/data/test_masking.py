"""n-gram masking of whole words: exact invariants, and statistics against formula and release."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_ds.data.masking import draw_positions, draw_replacements


def spans_of(positions, words):
    """Runs of masked words."""
    masked = set(positions.tolist())
    flags = [set(word) <= masked for word in words]
    runs = []
    length = 0
    for flag in [*flags, False]:
        if flag:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    return runs


def words_of(starts, edges):
    """Token numbers of each word, by the definition: segments cut at their word starts."""
    words = []
    for left, right in zip(edges[:-1], edges[1:], strict=True):
        for token in range(left + 1, right):
            if token == left + 1 or starts[token]:
                words.append([])
            words[-1].append(token)
    return words


@given(
    st.lists(st.booleans(), min_size=3, max_size=60),
    st.data(),
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
def test_whole_words_within_segments_and_budget(flags, data, budget, max_ngram, seed):
    starts = np.array(flags)
    edges = [0, len(flags) - 1]
    if len(flags) > 4 and data.draw(st.booleans()):
        edges.insert(1, data.draw(st.integers(2, len(flags) - 3)))
    before = starts.copy()
    draw = [
        draw_positions(starts, edges, budget, max_ngram, np.random.default_rng(seed))
        for _ in range(2)
    ]
    assert (starts == before).all() and (draw[0] == draw[1]).all()
    positions = draw[0].tolist()
    assert positions == sorted(set(positions)) and len(positions) <= budget
    assert not set(positions) & set(edges)
    words = words_of(flags, edges)
    for word in words:
        assert len(set(word) & set(positions)) in (0, len(word))
    # Single words are never skipped for an overlap: whatever is left would not have fitted.
    left = [len(word) for word in words if word[0] not in positions]
    assert max_ngram > 1 or not left or min(left) > budget - len(positions)


def test_same_statistics_as_the_release():
    """Against a plain transcription of the released loop, one segment of words of 1-3 tokens."""
    draw = random.Random(0)
    flags = [True] + [draw.random() < 0.7 for _ in range(125)] + [True]
    starts = np.array(flags)
    edges = [0, 126]
    rng = np.random.default_rng(0)
    words = words_of(flags, edges)
    positions = [draw_positions(starts, edges, 19, 3, rng) for _ in range(1500)]
    released_positions = [np.array(released_masking(words, 19, draw)) for _ in range(1500)]
    for measure in (len, lambda p: len(spans_of(p, words)), lambda p: p.mean()):
        a, b = [measure(p) for p in positions], [measure(p) for p in released_positions]
        error = np.sqrt((np.var(a) + np.var(b)) / 1500)
        assert abs(np.mean(a) - np.mean(b)) < 4 * error + 1e-9
    runs = [
        np.bincount([n for p in set_ for n in spans_of(p, words)], minlength=9)[1:5] / 1500
        for set_ in (positions, released_positions)
    ]
    np.testing.assert_allclose(runs[0], runs[1], rtol=0.1, atol=0.03)


def released_masking(words, budget, draw):
    """create_masked_lm_predictions of the release, word by word, for one segment."""
    candidates = [[words[i : i + n] for n in (1, 2, 3)] for i in range(len(words))]
    draw.shuffle(candidates)
    masked = []
    for grams in candidates:
        if len(masked) >= budget:
            break
        grams = [g for n, g in enumerate(grams, 1) if len(g) == n]
        n = draw.choices(range(len(grams)), [1 / (k + 1) for k in range(len(grams))])[0]
        tokens = sum(grams[n], [])
        while len(masked) + len(tokens) > budget and n:
            n -= 1
            tokens = sum(grams[n], [])
        if len(masked) + len(tokens) > budget or set(tokens) & set(masked):
            continue
        masked += tokens
    return sorted(masked)


def test_80_10_10():
    rng = np.random.default_rng(0)
    labels = np.full(200_000, 7)
    got = draw_replacements(labels, 4, 1000, rng)
    kept, masked = (got == 7).mean(), (got == 4).mean()
    assert masked == pytest.approx(0.8 + 0.1 / 1000, abs=0.004)
    assert kept == pytest.approx(0.1 + 0.1 / 1000, abs=0.003)
    others = np.bincount(got[(got != 7) & (got != 4)], minlength=1000)
    assert others[:4].min() > 0 and others[-1] > 0  # the full list, special pieces included
    assert len(others) == 1000 and others[8:].std() < 2 * np.sqrt(others[8:].mean())
