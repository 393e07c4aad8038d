"""Which characters of a text each token stands for, through all that normalisation does to it.

Normalisation replaces some pairs of quotes, takes letters apart (accents, ligatures, fractions),
drops accents and lower-cases: what is left of a small unit of the text depends on that unit alone.
So a text is cut into units, each is normalised by the very function that pretraining uses, and the
parts are compared with the whole; a word for which that does not hold is one unit.
"""

import re
from itertools import accumulate

import numpy as np

from albert_ds.data.vocab import Vocab

# Quotes written as two characters become one; an accent may be a character of its own.
UNIT = re.compile(r"``|''|.[\u0300-\u036f]*", re.DOTALL)
WORD = re.compile(r"\s|\S+")


class OffsetEncoder:
    """Tokenises as `Vocab.encode` does and says where each token came from."""

    def __init__(self, vocab: Vocab):
        self._vocab = vocab
        self._known: dict[str, str] = {}  # units are few: letters, digits, punctuation

    def encode(self, text: str) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The ids of a text, and of each token the first character and that after the last.

        The characters of a token neither begin nor end with white space. One that stands for
        nothing but white space has none: its two numbers are equal.
        """
        normalised, begins, ends = self._align(text)
        ids, offsets = self._vocab.encode_with_offsets(normalised)
        first = np.empty(len(ids), np.int32)
        after = np.empty(len(ids), np.int32)
        for token, (low, high) in enumerate(offsets):
            begin, end = (begins[low], ends[high - 1]) if low < high else (0, 0)
            while begin < end and text[begin].isspace():
                begin += 1
            while begin < end and text[end - 1].isspace():
                end -= 1
            first[token], after[token] = begin, end
        return ids, first, after

    def _align(self, text: str) -> tuple[str, list[int], list[int]]:
        """The normalised text, and for each of its characters the span of the original."""
        whole = self._vocab.normalise(text)
        parts = self._cut(text, UNIT)
        if "".join(part for _, part in parts) != whole:
            parts = [piece for word in WORD.findall(text) for piece in self._cut_word(word)]
            assert "".join(part for _, part in parts) == whole, "normalisation crosses white space"
        stops = accumulate(len(unit) for unit, _ in parts)
        begins: list[int] = []
        ends: list[int] = []
        for stop, (unit, part) in zip(stops, parts, strict=True):
            if part:
                begins += [stop - len(unit)] * len(part)
                ends += [stop] * len(part)
            elif ends:  # a mark that is dropped belongs to the letter before it
                ends[-1] = stop
        return whole, begins, ends

    def _cut(self, text: str, pattern: re.Pattern) -> list[tuple[str, str]]:
        known = self._known
        parts = []
        for unit in pattern.findall(text):
            if unit not in known:
                known[unit] = self._vocab.normalise(unit)
            parts.append((unit, known[unit]))
        return parts

    def _cut_word(self, word: str) -> list[tuple[str, str]]:
        parts = self._cut(word, UNIT)
        whole = self._vocab.normalise(word)
        return parts if "".join(part for _, part in parts) == whole else [(word, whole)]


def cover(first: np.ndarray, after: np.ndarray, begin: int, end: int) -> tuple[int, int] | None:
    """The smallest run of tokens (first, last) that covers characters [begin, end).

    None where no token stands for any of them.
    """
    touching = np.flatnonzero((first < end) & (after > begin) & (first < after))
    return (int(touching[0]), int(touching[-1])) if len(touching) else None
