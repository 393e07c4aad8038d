"""Every character of a text is found again in a token, whatever normalisation did to it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_ds.tasks.squad.windows import cover, encode_with_characters
from albert_ds.vocab.vocab import Normalisation, train_vocab
from tests.data.corpus import make_documents

TRICKY = (
    *("Beyonc\u00e9", "cafe\u0301", "na\u00efve", "\u0130stanbul", "STRASSE", "stra\u00dfe"),
    *("\u00bd", "\ufb01sh", "\u2167", "1,234,567", "96,", "\u00a33.50", "\u20ac4", "\u2013", "--"),
    *("``quoted''", "''", "`", "\ud55c\uad6d\uc5b4", "\u0e01\u0e33", "\u05e9\u05c1\u05dc\u05d5"),
    *("\u00a0", "\u0085", "\u200b", "\t", "  ", "\n", "x\u0301\u0302y", "\u2126", "\uff21", "(a)"),
    *("\u0ecd\u0eb2", "\u0e4d\u0e32"),  # which become one character
    *("\u0301", "\U0001d400", "\u1e9e", "\u03a3\u03a3", "[CLS]", "<pad>", "a", "of the", "Z"),
)
texts = st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=4)), max_size=12).map(
    lambda parts: " ".join(parts)
)


@pytest.fixture(scope="module")
def vocabs(vocab):
    """One that drops accents and case, one that keeps both and writes bytes."""
    text = [sentence for document in make_documents(120) for sentence in document]
    cased = Normalisation(lower_case=False)
    return vocab, train_vocab(text, cased, vocab_size=600, byte_fallback=True)


@settings(max_examples=1500)
@given(text=texts, is_cased=st.booleans(), data=st.data())
def test_every_span_is_recovered_exactly_or_as_the_smallest_that_covers_it(
    vocabs, text, is_cased, data
):
    vocab = vocabs[is_cased]
    ids, first, after = encode_with_characters(vocab.build_tokenizer(plain=True), text)
    assert ids == vocab.encode([text])[0]
    # Tokens come in the order of the text, and none begins or ends with white space.
    real = first < after
    assert (np.diff(first[real]) >= 0).all() and (np.diff(after[real]) >= 0).all()
    for low, high in zip(first[real], after[real], strict=True):
        assert text[low:high] == text[low:high].strip()
    # What no token covers is white space, or leaves nothing when it is normalised.
    covered = np.zeros(len(text), bool)
    for low, high in zip(first, after, strict=True):
        covered[low:high] = True
    lost = "".join(np.array(list(text))[~covered].tolist()) if text else ""
    assert vocab.normalise(lost).strip() == ""
    if not text:
        return
    begin = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(begin + 1, len(text)))
    span = cover(first, after, begin, end)
    if span is None:
        assert not covered[begin:end].any()
        return
    low, high = span
    wanted = [i for i in range(begin, end) if covered[i]]
    inside = range(first[low], after[high])
    assert wanted[0] in inside and wanted[-1] in inside
    # The smallest: without its first or last token it covers less of what was wanted.
    for kept in (range(low + 1, high + 1), range(low, high)):
        left = {i for token in kept for i in range(first[token], after[token])}
        whole = {i for token in range(low, high + 1) for i in range(first[token], after[token])}
        assert low == high or left & set(wanted) < whole & set(wanted) or _twin(kept, first, after)


def _twin(kept, first, after) -> bool:
    """Two tokens may stand for one character (a fraction, a ligature): then both belong."""
    spans = [(first[t], after[t]) for t in (kept.start - 1, *kept, kept.stop) if t < len(first)]
    return len(set(spans)) < len(spans)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("singer Beyonc\u00e9 Knowles", "Beyonc\u00e9"),
        ("in 1,234,567 days", "1,234,567"),
        ("the  ``Big'' one", "``Big''"),
        ("caf\u00e9 cafe\u0301 cafe", "cafe\u0301"),
        ("THE END", "END"),
        ("a \u05d0\u05b8 b", "\u05d0\u05b8"),  # a vowel sign is dropped, and belongs to its letter
        ("a\u0085b c", "b"),
        ("\u0ecd\u0eb2", "\u0ecd\u0eb2"),
    ],
)
def test_an_answer_is_cut_out_as_it_was_written(vocab, text, answer):
    _, first, after = encode_with_characters(vocab.build_tokenizer(plain=True), text)
    begin = text.index(answer)
    low, high = cover(first, after, begin, begin + len(answer))
    assert text[first[low] : after[high]] == answer
