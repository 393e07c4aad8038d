"""Which pieces start a word: whole-word masking for every script, not only for a-z.

A word is a piece that starts one and the pieces after it that do not.
"""

import unicodedata

import numpy as np

from albert_ds.data.vocab import SPECIAL_PIECES

WORD_RULES = ("unicode", "released")

_WORD_MARK = "\u2581"  # SentencePiece's space
_RELEASED = frozenset("abcdefghijklmnopqrstuvwxyz" + '!"#$%&()*+,-./:;?@[\\]^_`{|}~')
# Scripts whose words are not set apart, beside those that Unicode calls East Asian wide.
_UNSPACED = ("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ")


def build_word_starts(pieces: list[str], rule: str) -> np.ndarray:
    """bool [V]: whether the piece of that id starts a word.

    unicode   A piece with the word mark does, and so does a single punctuation mark or symbol, a
              piece of a script written without spaces, and a special piece. Letters, digits and
              combining marks of all other scripts go on with the word they follow.
    released  As in the release: a piece with the word mark or "<" in front, a single one of some
              ASCII punctuation marks, and every piece with any character beyond those and a-z.
    """
    starts = _starts_word if rule == "unicode" else _starts_word_as_released
    return np.array([piece in SPECIAL_PIECES or starts(piece) for piece in pieces])


def _starts_word(piece: str) -> bool:
    if piece.startswith(_WORD_MARK) or any(map(_is_unspaced, piece)):
        return True
    return len(piece) == 1 and unicodedata.category(piece)[0] in "PS"


def _is_unspaced(char: str) -> bool:
    if char.isascii():
        return False
    wide = unicodedata.east_asian_width(char) in "WF"
    return wide or unicodedata.name(char, "").startswith(_UNSPACED)


def _starts_word_as_released(piece: str) -> bool:
    if piece.startswith((_WORD_MARK, "<")):
        return True
    lower = piece.lower()
    return not _RELEASED.issuperset(lower) or (len(piece) == 1 and not piece.isalpha())
