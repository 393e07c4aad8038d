"""Packing keeps every token; windows and pairs are what they claim to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from albert_ds.data.segments import (
    NO_LABEL,
    SentenceRuns,
    cut_pair,
    draw_pair,
    draw_target,
    draw_window,
    pack_sentences,
    truncate_pair,
)
from albert_ds.data.shards import Sequence

seeds = st.integers(0, 2**32)
sentence_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def sequence(lengths: list[int], document: int = 0, first: int = 0) -> Sequence:
    """Tokens are numbered, so that where each one came from can be seen."""
    ends = np.cumsum(lengths).astype(np.uint16)
    return Sequence(document, ends, np.arange(first, first + ends[-1]).astype(np.uint16))


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 20))
def test_packing_keeps_every_token_in_order(lengths, capacity):
    sentences = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]) if lengths else []
    packed = list(pack_sentences([s.tolist() for s in sentences], capacity))
    assert [i for ids, _ in packed for i in ids] == list(range(sum(lengths)))
    assert all(len(ids) <= capacity and ends[-1] == len(ids) for ids, ends in packed)
    # Every sentence ends where one ends; a further boundary is a cut in a sentence over capacity.
    ends = np.cumsum([n for _, e in packed for n in np.diff(e, prepend=0)]).tolist()
    assert set(np.cumsum(lengths).tolist()) <= set(ends)
    assert len(ends) == sum(-(-length // capacity) for length in lengths)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 20))
def test_full_packing_reaches_the_length_with_its_last_sentence(lengths, capacity):
    sentences = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]) if lengths else []
    packed = list(pack_sentences([s.tolist() for s in sentences], capacity, "full"))
    assert [i for ids, _ in packed for i in ids] == list(range(sum(lengths)))
    for ids, ends in packed:
        assert ends[-1] == len(ids) and (np.diff(ends, prepend=0) <= capacity).all()
        assert [0, *ends][-2] < capacity  # without its last sentence it was not full
    assert all(len(ids) >= capacity for ids, _ in packed[:-1])


def test_packing_is_greedy():
    sentences = [[1] * n for n in (3, 3, 5, 4, 11, 1)]
    assert [ends for _, ends in pack_sentences(sentences, 10)] == [[3, 6], [5, 9], [10], [1, 2]]
    full = [ends for _, ends in pack_sentences(sentences, 10, "full")]
    assert full == [[3, 6, 11], [4, 14], [1, 2]]


@given(sentence_lengths, st.integers(1, 400), seeds)
def test_window_is_the_fewest_sentences_that_hold_the_target(lengths, target, seed):
    ends = np.cumsum(lengths).astype(np.uint16)
    i, j = draw_window(ends, target, np.random.default_rng(seed))
    held = sum(lengths[i:j])
    assert held >= min(target, sum(lengths))
    assert held - lengths[j - 1] < target
    if sum(lengths) <= target:
        assert (i, j) == (0, len(lengths))


def test_window_starts_uniformly_where_the_target_is_left():
    rng = np.random.default_rng(0)
    starts = [draw_window(np.array([3, 5, 9, 12]), 7, rng)[0] for _ in range(3000)]
    counts = np.bincount(starts, minlength=4) / 3000
    np.testing.assert_allclose(counts, [1 / 3, 1 / 3, 1 / 3, 0], atol=0.03)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 80), seeds)
def test_truncation_is_the_release_s(first, second, target, seed):
    lengths = first, second
    a, b = truncate_pair(
        np.arange(first), np.arange(100, 100 + second), target, np.random.default_rng(seed)
    )
    while first + second > target:  # one token at a time, as released
        if first > second:
            first -= 1
        else:
            second -= 1
    assert (len(a), len(b)) == (first, second) == cut_pair(*lengths, target)
    assert first >= 1 and second >= 1
    assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all()  # only ends were cut


def test_truncation_cuts_both_ends_alike():
    rng = np.random.default_rng(0)
    cut_in_front = [truncate_pair(np.arange(9), np.arange(1), 2, rng)[0][0] for _ in range(4000)]
    assert np.bincount(cut_in_front, minlength=9).sum() == 4000
    np.testing.assert_allclose(np.mean(cut_in_front), 4, atol=0.1)
    np.testing.assert_allclose(np.var(cut_in_front), 2, atol=0.15)  # binomial(8, 1/2)


@pytest.mark.parametrize("objective", ["sop", "none"])
@given(lengths=sentence_lengths, target=st.integers(2, 400), seed=seeds)
def test_sop_and_none(objective, lengths, target, seed):
    stored = sequence(lengths)
    rng = np.random.default_rng(seed)
    pair = draw_pair(stored, target, objective, _no_partner, rng)
    assert pair.used == len(pair.first) + len(pair.second)
    assert pair.used <= min(target, sum(lengths))
    parts = [pair.first, pair.second]
    if not len(pair.second):
        assert pair.label == NO_LABEL
        starts = [0, *stored.ends[:-1]]
        ends = stored.ends
        assert any(
            s <= pair.first[0] and pair.first[-1] < e for s, e in zip(starts, ends, strict=True)
        )
        return
    assert pair.label in ((0, 1) if objective == "sop" else (NO_LABEL,))
    if pair.label == 1:
        parts.reverse()
    before, after = parts
    assert before[-1] < after[0]  # in the order of the text, swapped only under label 1
    if pair.used == sum(lengths):
        assert after[0] in stored.ends  # the split is where a sentence ends


def _no_partner(length):
    raise AssertionError("only nsp may ask for another document")


def test_sop_swaps_half_and_splits_uniformly():
    rng = np.random.default_rng(0)
    pairs = [draw_pair(sequence([2, 3, 4]), 9, "sop", _no_partner, rng) for _ in range(4000)]
    assert abs(np.mean([pair.label for pair in pairs]) - 0.5) < 0.03
    splits = [min(len(pair.first), 9) if pair.label == 0 else len(pair.second) for pair in pairs]
    np.testing.assert_allclose(np.bincount(splits)[[2, 5]] / 4000, 0.5, atol=0.03)


def marked(rng, count: int) -> list[Sequence]:
    """Sequences of several documents, whose ids tell the document and the place."""
    lengths = [rng.integers(1, 9, rng.integers(1, 12)).tolist() for _ in range(count)]
    return [sequence(each, n // 3, 1000 * n) for n, each in enumerate(lengths)]


@pytest.mark.parametrize("count", [4, 40])
def test_runs_are_whole_sentences_of_another_document(count):
    rng = np.random.default_rng(count)
    sequences = marked(rng, count)
    runs = SentenceRuns(sequences)
    for length in [*range(1, 60), 500]:
        for document in (0, count // 6):
            lengths = {
                int(stored.ends[j] - stored.ends[i])
                for stored in sequences
                if stored.document != document
                for i in range(len(stored.ends))
                for j in range(i + 1, len(stored.ends))
            }
            run = runs.find(length, document, rng)
            if not lengths:
                assert run is None
                continue
            number, begin, end = run
            stored = sequences[number]
            assert stored.document != document
            assert begin in stored.ends[:-1] and end in stored.ends  # never the first sentence
            assert abs(end - begin - length) == min(abs(n - length) for n in lengths)


def test_runs_are_drawn_from_all_that_fit():
    rng = np.random.default_rng(0)
    runs = SentenceRuns([sequence([3, 5, 5, 5], document, 0) for document in range(5)])
    draws = [runs.find(5, 0, rng) for _ in range(4000)]
    counts = np.zeros((5, 4), int)
    for number, begin, end in draws:
        assert end - begin == 5
        counts[number, (begin + 2) // 5 - 1] += 1
    assert counts[0].sum() == 0
    assert counts[1:, :3].min() > 150  # 12 of them; the first after document 0 is drawn more often


@given(lengths=sentence_lengths, target=st.integers(2, 400), other=st.integers(1, 60), seed=seeds)
def test_nsp_pairs_have_one_form_whatever_their_label(lengths, target, other, seed):
    """The second segment of either label has the same length and loses tokens at the same ends."""
    stored = sequence(lengths)
    asked = []

    def draw_other(length):
        asked.append(length)
        return np.arange(1000, 1000 + other)

    pair = draw_pair(stored, target, "nsp", draw_other, np.random.default_rng(seed))
    if not len(pair.second):
        assert pair.label == NO_LABEL and not asked
        return
    assert pair.label in (0, 1) and len(asked) == 1
    if pair.label == 1:
        assert (pair.second >= 1000).all()
    else:
        assert pair.second[0] > pair.first[-1] and pair.second[-1] < stored.ends[-1]
    assert pair.used == len(pair.first) + len(pair.second) <= target
    # The same draw with the other label: all that differs is whose tokens the second ones are.
    twin = draw_pair(stored, target, "nsp", draw_other, Relabelled(seed))
    assert twin.label == 1 - pair.label
    assert twin.first.tolist() == pair.first.tolist()
    assert len(twin.second) == len(pair.second)
    true, false = (pair, twin) if twin.label else (twin, pair)
    kept = asked[0] if other == asked[0] else max(1, min(other, asked[0]) - 1)
    begin = int(false.second[0]) - 1000  # tokens cut at its front
    assert int(true.second[0]) - begin in stored.ends  # the same number is cut of the true one
    assert begin + len(false.second) <= kept


class Relabelled:
    """A generator that draws the other label."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def __getattr__(self, name):
        return getattr(self._rng, name)

    def random(self):
        return 1 - self._rng.random()


def test_short_draws():
    rng = np.random.default_rng(0)
    targets = np.array([draw_target(509, 0.1, rng) for _ in range(20000)])
    short = targets[targets < 509]
    assert abs(len(short) / 20000 - 0.1) < 0.01
    assert short.min() >= 2
    np.testing.assert_allclose(short.mean(), (2 + 508) / 2, rtol=0.03)
    assert {draw_target(509, 0.0, rng) for _ in range(100)} == {509}
    assert {draw_target(4, 1.0, rng) for _ in range(100)} == {2, 3, 4}
