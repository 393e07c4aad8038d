"""Whole words in every script, and the release's rule as a preset."""

import numpy as np

from albert_ds.vocab.vocab import Normalisation, train_vocab
from albert_ds.vocab.words import (
    CONTINUES,
    LONE_MARK,
    SPECIAL,
    STARTS,
    build_word_starts,
    find_word_starts,
)

MARK = "\u2581"


# As the release has it: a mark of its list that stands alone, and what is no Latin letter.
RELEASED_STARTS = [MARK, MARK + "the", "[CLS]", "<pad>", "-", ".", "'", "'s", "1999", "a1"]
RELEASED_STARTS += ["\u20ac", "\u2013", "\u00fc", "gr\u00f6\u00dfe", "\u0438\u044f", "\u03bf\u03c2"]
RELEASED_STARTS += ["\u093f", "\u05d5\u05ea", "\u4e2d\u6587", "\u30ab\u30bf", "\ud55c"]
RELEASED_STARTS += ["\u0301", "\u0e2a\u0e27", "\u0f56\u0f7c", "\U0001f600"]
RELEASED_CONTINUES = ["ing", "ING", "),"]  # two marks of its list are none


def test_the_rule_of_the_release():
    assert build_word_starts(RELEASED_STARTS, "released").all()
    assert not build_word_starts(RELEASED_CONTINUES, "released").any()


SCRIPTS = {
    LONE_MARK: [MARK],
    SPECIAL: ["[CLS]"],
    STARTS: [
        *(MARK + "\ud55c\uad6d", "\u4e2d\u6587", "\u30ab\u30bf", "\u0e2a\u0e27", "\u0e94\u0eb5"),
        *("\u1781\u17d2\u1798", "\u1019\u103c", "\u0f56\u0f7c\u0f51", "\u3002", "-", "'", "\u20ac"),
        *("\U0001f600", "<0xE9>"),  # the last: the first byte of a Han character
    ],
    CONTINUES: [
        "\uc5b4\ub294",  # Hangul sets words apart with spaces
        "\u0e35\u0e48",  # a vowel and a tone are no word
        *("\u0438\u044f", "\u0645\u0629", "ing", "1999", "gr\u00f6\u00dfe", "\u0301", "\u093f"),
        *("'s", "),", "<0x9F>", "<0xC3>"),  # the last: the first byte of an accented Latin letter
    ],
}


def test_the_rule_of_scripts():
    for kind, pieces in SCRIPTS.items():
        assert build_word_starts(pieces, "scripts").tolist() == [kind] * len(pieces)


def test_a_lone_word_mark_is_never_a_word():
    """It belongs to the piece after it; at the end of a segment, to the one before."""
    pieces = ["[CLS]", MARK, "\u4e2d", "\u6587", MARK, "ab", MARK, "[SEP]"]
    expected = [True, True, False, True, True, False, False, True]
    kinds = build_word_starts(pieces, "scripts")
    assert find_word_starts(kinds).tolist() == expected
    kinds = build_word_starts(pieces, "released")  # where it is one
    assert find_word_starts(kinds).tolist() == (kinds > 0).tolist()


def test_a_korean_word_is_what_stands_between_spaces():
    text = "\ud55c\uad6d\uc5b4\ub294 \uc544\ub984\ub2f5\ub2e4. "
    text += "\ub098\ub294 \ud559\uad50\uc5d0 \uac04\ub2e4!"
    vocab = train_vocab([text[i:] for i in range(20)] * 9, Normalisation(), vocab_size=28)
    ids = vocab.encode([text])[0]
    starts = find_word_starts(build_word_starts(vocab.pieces, "scripts")[np.array(ids)])
    words = len(text.split()) + 2  # and two marks at the end of a sentence
    assert len(ids) > words and starts.sum() == words
