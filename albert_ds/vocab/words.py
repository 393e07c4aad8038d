"""Which pieces start a word, for whole-word masking in every script.

A word is a piece that starts one and the pieces after it that do not.
"""

import re
import unicodedata
from functools import lru_cache

import numpy as np

from albert_ds.vocab.vocab import SPECIAL_PIECES, WORD_MARK

# What a piece does: goes on with the word before it, starts a word, is a word mark alone, is [CLS].
CONTINUES, STARTS, LONE_MARK, SPECIAL = range(4)

_RELEASED = frozenset("abcdefghijklmnopqrstuvwxyz" + '!"#$%&()*+,-./:;?@[\\]^_`{|}~')
# Scripts without spaces between words, beside those that Unicode calls East Asian wide.
_UNSPACED = ("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ")
# First bytes of Han, Kana and emoji in UTF-8: with byte fallback, a character starts with one.
_FIRST_BYTE = re.compile("<0x(E[3-9]|F[0-4])>")
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


def build_word_starts(pieces: list[str], rule: str) -> np.ndarray:
    """int8 [V]: what the piece of that id does, as `find_word_starts` reads it.

    scripts   A piece with the word mark starts a word, and so does a single punctuation mark or
              symbol, a piece of a script without spaces between words (Han, Kana, Thai, Lao,
              Khmer, Myanmar, Tibetan) and a special piece. Letters, digits and combining marks of
              all other scripts, Hangul among them, go on with the word that they follow. A lone
              word mark belongs to the piece after it.
    released  As in the release: a piece with the word mark or "<" in front, a single one of some
              ASCII punctuation marks, and every piece with any character beyond those and a-z.
    """
    kinds = {"scripts": _find_kind, "released": _starts_as_released}
    special = SPECIAL if rule == "scripts" else STARTS
    return np.array(
        [special if piece in SPECIAL_PIECES else kinds[rule](piece) for piece in pieces], np.int8
    )


def find_word_starts(kinds: np.ndarray) -> np.ndarray:
    """bool [T]: whether a token starts a word, for tokens of these kinds in their order."""
    starts = kinds > CONTINUES
    follows_mark = kinds[:-1] == LONE_MARK
    starts[:-1] &= ~(follows_mark & (kinds[1:] == SPECIAL))  # it has no piece to belong to
    starts[1:] &= ~follows_mark | (kinds[1:] == SPECIAL)
    return starts


def mark_words(pieces: list[str], *, segmented: bool) -> np.ndarray:
    """bool [V]: whether a word of the text begins with the piece of that id; [2 V] of segmented
    text, as its ids are stored.

    A word is what stands between two spaces of the normalised text, or what a segmenter has marked.
    A word that is cut counts where it begins.
    """
    if segmented:
        return np.repeat([False, True], len(pieces))
    return np.array([piece.startswith(WORD_MARK) for piece in pieces])


@lru_cache(maxsize=1 << 16)
def is_unspaced(char: str) -> bool:
    """Whether a character is of a script without spaces between words."""
    if char.isascii():
        return False
    name = unicodedata.name(char, "")
    wide = unicodedata.east_asian_width(char) in "WF" and "HANGUL" not in name
    return wide or name.startswith(_UNSPACED)


def _find_kind(piece: str) -> int:
    if piece == WORD_MARK:
        return LONE_MARK
    if piece.startswith(WORD_MARK) or _FIRST_BYTE.fullmatch(piece):
        return STARTS
    if BYTE_PIECE.fullmatch(piece) or unicodedata.category(piece[0])[0] == "M":
        return CONTINUES
    is_mark = len(piece) == 1 and unicodedata.category(piece)[0] in "PS"
    return STARTS if is_mark or any(map(is_unspaced, piece)) else CONTINUES


def _starts_as_released(piece: str) -> bool:
    if piece.startswith((WORD_MARK, "<")):
        return True
    lower = piece.lower()
    return not _RELEASED.issuperset(lower) or (len(piece) == 1 and not piece.isalpha())
