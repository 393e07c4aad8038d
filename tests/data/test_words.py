"""Whole words in every script, and the release's rule as a preset."""

import numpy as np
import pytest

from albert_ds.data.vocab import Normalisation, Vocab, read_vocab, train_vocab
from albert_ds.data.words import (
    CONTINUES,
    LONE_MARK,
    SPECIAL,
    STARTS,
    build_word_starts,
    find_word_starts,
)
from tests.data.corpus import SHARED

MARK = "\u2581"


@pytest.mark.parametrize(
    "piece, released",
    [
        (MARK + "the", True),
        (MARK, True),
        ("ing", False),
        ("ING", False),
        ("[CLS]", True),
        ("<pad>", True),
        ("-", True),
        (".", True),
        ("'", True),  # not in the release's list, and so "another character"
        ("'s", True),
        ("),", False),  # of the release's marks, but two of them
        ("\u20ac", True),
        ("\u2013", True),
        ("\u00fc", True),
        ("gr\u00f6\u00dfe", True),
        ("\u0438\u044f", True),
        ("\u03bf\u03c2", True),
        ("\u0301", True),
        ("\u093f", True),
        ("\u05d5\u05ea", True),
        ("1999", True),
        ("a1", True),
        ("\u4e2d\u6587", True),
        ("\u30ab\u30bf", True),
        ("\ud55c", True),
        ("\u0e2a\u0e27", True),
        ("\u0f56\u0f7c", True),
        ("\U0001f600", True),
    ],
)
def test_the_rule_of_the_release(piece, released):
    assert build_word_starts([piece], "released").tolist() == [released]


@pytest.mark.parametrize(
    "piece, kind",
    [
        (MARK, LONE_MARK),
        (MARK + "\ud55c\uad6d", STARTS),
        ("\uc5b4\ub294", CONTINUES),  # Hangul sets words apart with spaces
        ("\u4e2d\u6587", STARTS),
        ("\u30ab\u30bf", STARTS),
        ("\u0e2a\u0e27", STARTS),
        ("\u0e35\u0e48", CONTINUES),  # a vowel and a tone are no word
        ("\u0e94\u0eb5", STARTS),
        ("\u1781\u17d2\u1798", STARTS),
        ("\u1019\u103c", STARTS),
        ("\u0f56\u0f7c\u0f51", STARTS),
        ("\u0438\u044f", CONTINUES),
        ("\u0645\u0629", CONTINUES),
        ("\u3002", STARTS),
        ("ing", CONTINUES),
        ("1999", CONTINUES),
        ("gr\u00f6\u00dfe", CONTINUES),
        ("\u0301", CONTINUES),
        ("\u093f", CONTINUES),
        ("-", STARTS),
        ("'", STARTS),
        ("'s", CONTINUES),
        ("),", CONTINUES),
        ("\u20ac", STARTS),
        ("\U0001f600", STARTS),
        ("[CLS]", SPECIAL),
        ("<0xE9>", STARTS),  # the first byte of a Han character
        ("<0x9F>", CONTINUES),
        ("<0xC3>", CONTINUES),  # the first byte of a Latin letter with an accent
    ],
)
def test_the_rule_of_scripts(piece, kind):
    assert build_word_starts([piece], "scripts").tolist() == [kind]


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


def test_umlauts_stay_within_their_word():
    path = SHARED / "spm" / "albert-layout-de.model"
    if not path.is_file():
        pytest.skip(f"no real vocabulary: {path} is absent")
    vocab = Vocab(read_vocab(path).model, Normalisation(form="albert"))
    ids = vocab.encode(["Kapit\u00e4nsm\u00fctzen, gew\u00f6hnt an Gef\u00e4ngnisw\u00e4rter."])[0]
    pieces = [vocab.pieces[i] for i in ids]
    continued = [piece for piece in pieces if not piece.isascii() and piece[0] != MARK]
    assert continued  # the text does put the rule to the test
    marked = [piece[0] == MARK or piece in ",." for piece in pieces]
    starts = find_word_starts(build_word_starts(vocab.pieces, "scripts")[ids])
    assert starts.tolist() == marked
    assert build_word_starts(vocab.pieces, "released")[ids].sum() == sum(marked) + len(continued)
