"""Whole words in every script, and the release's rule as a preset."""

import pytest

from albert_ds.data.vocab import Normalisation, Vocab, read_vocab
from albert_ds.data.words import build_word_starts
from tests.data.corpus import SHARED

MARK = "\u2581"


@pytest.mark.parametrize(
    "piece, unicode, released",
    [
        (MARK + "the", True, True),
        (MARK, True, True),
        ("ing", False, False),
        ("ING", False, False),
        ("[CLS]", True, True),
        ("<pad>", True, True),
        ("-", True, True),
        (".", True, True),
        ("'", True, True),  # not in the release's list, and so "another character"
        ("'s", False, True),
        ("),", False, False),  # of the release's marks, but two of them
        ("\u20ac", True, True),
        ("\u2013", True, True),
        ("\u00fc", False, True),
        ("gr\u00f6\u00dfe", False, True),
        ("\u0438\u044f", False, True),
        ("\u03bf\u03c2", False, True),
        ("\u0301", False, True),
        ("\u093f", False, True),
        ("\u05d5\u05ea", False, True),
        ("1999", False, True),
        ("a1", False, True),
        ("\u4e2d\u6587", True, True),
        ("\u30ab\u30bf", True, True),
        ("\ud55c", True, True),
        ("\u0e2a\u0e27", True, True),
        ("\u0f56\u0f7c", True, True),
        ("\U0001f600", True, True),
    ],
)
def test_rules(piece, unicode, released):
    assert build_word_starts([piece], "unicode").tolist() == [unicode]
    assert build_word_starts([piece], "released").tolist() == [released]


def test_umlauts_stay_within_their_word():
    path = SHARED / "spm" / "albert-layout-de.model"
    if not path.is_file():
        pytest.skip(f"no real vocabulary: {path} is absent")
    vocab = Vocab(read_vocab(path).model, Normalisation(lower_case=True, keep_accents=True))
    ids = vocab.encode(["Kapit\u00e4nsm\u00fctzen, gew\u00f6hnt an Gef\u00e4ngnisw\u00e4rter."])[0]
    pieces = [vocab.pieces[i] for i in ids]
    continued = [piece for piece in pieces if not piece.isascii() and piece[0] != MARK]
    assert continued  # the text does put the rule to the test
    marked = [piece[0] == MARK or piece in ",." for piece in pieces]
    assert build_word_starts(vocab.pieces, "unicode")[ids].tolist() == marked
    assert build_word_starts(vocab.pieces, "released")[ids].sum() == sum(marked) + len(continued)
