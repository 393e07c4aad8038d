"""The characters of the original text that each token stands for.

Normalisation replaces pairs of quotes, decomposes letters (accents, ligatures, fractions), drops
accents and lower-cases. It does so within small units of the text, independently of the rest. So a
text is cut into units, each is normalised by the function that pretraining uses, and the joined
parts are compared with the normalised whole. A word for which they differ is one unit.
"""

import re
from itertools import accumulate

import numpy as np

from albert_ds.data.vocab import Vocab

# Quotes written as two characters become one; accents, the voicing marks of Kana and the later
# parts of a Hangul syllable may be characters of their own.
UNIT = re.compile(r"``|''|.[\u0300-\u036f\u3099\u309a\u1160-\u11ff]*", re.DOTALL)
WORD = re.compile(r"\s|\S+")


class OffsetEncoder:
    """Tokenises as `Vocab.encode` does, and returns each token's characters."""

    def __init__(self, vocab: Vocab):
        self._vocab = vocab
        self._known: dict[str, str] = {}  # units are few: letters, digits, punctuation

    def encode(self, text: str) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The ids of a text; of each token its first character and the one after its last.

        The characters of a token neither begin nor end with white space. A token of white space
        alone has none: its two numbers are equal.
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
            elif ends:  # a dropped mark belongs to the letter before it
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
