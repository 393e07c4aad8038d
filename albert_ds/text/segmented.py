"""Text whose words are marked, in a script without spaces (--segmented).

A segmenter has separated them by spaces, or their writers by zero-width spaces. The marks are taken
out before anything else is done, so sentences, ids, documents and held-out documents are those of
the plain text. They come back as a mark on the ids: the vocabulary size is added to the id of a
token that starts a word.
"""

import math
import unicodedata
from collections.abc import Iterator
from itertools import accumulate, pairwise

from albert_ds.text.languages import needs_no_space
from albert_ds.vocab.vocab import WORD_END, Vocab

SPACE, ZERO_WIDTH = " ", "\u200b"
LONGEST_WORD = 32  # characters; writers leave whole sentences without a zero-width space


def remove_spaces(line: str) -> str:
    """The plain text of a segmented line.

    A space stays between two characters of scripts that have spaces, as in "hello world".
    """
    text = ""
    for word in line.split():
        text += word if not text or needs_no_space(text[-1], word[0]) else " " + word
    return text


def find_starts(lines: list[str]) -> set[int]:
    """Where each word of segmented lines starts: the number of characters before it.

    White space does not count, so the numbers hold for the plain text and its sentences too.
    """
    lengths = [len(word) for line in lines for word in line.split()]
    return {0, *accumulate(lengths)}


def split_into_words(sentences: list[str], lines: list[str]) -> Iterator[str]:
    """The plain sentences of a document of segmented `lines`, with WORD_END between words."""
    for sentence, words in zip(sentences, _find_words(sentences, find_starts(lines)), strict=True):
        text = WORD_END.join(sentence[i:j] for i, j in pairwise([*words, len(sentence)]))
        yield text.replace(f" {WORD_END}", " ")  # a space that stays ends a word by itself


def encode_segmented(
    sentences: list[str], starts: set[int], vocab: Vocab, longest: float = math.inf
) -> tuple[list[list[int]], int]:
    """Encode the sentences of a document as plain text, with its `starts` of `find_starts`.

    In a word of more than `longest` characters every piece is a word, as without marks. Returns the
    marked ids of each sentence, and the number of words that are joined with the word before,
    because one piece holds characters of both.
    """
    marked = []
    joined = 0
    for sentence, words in zip(sentences, _find_words(sentences, starts), strict=True):
        normalised, places = _normalise_words(sentence, words, vocab)
        pieces, offsets = vocab.encode_with_offsets(normalised)
        inner = _find_inner(normalised, places, longest)
        starting = []
        inside = []
        last = -1
        for begin, end in offsets:
            while begin < end and normalised[begin] == " ":  # the word mark of the piece
                begin += 1
            # Of a lone word mark and its piece, and of the bytes of a character, the first starts.
            starting.append(begin > last and begin in places)
            inside.append(begin > last and begin in inner)
            last = max(last, begin)
        joined += len(places) - sum(starting)
        marked.append(
            [i + vocab.size * (s or t) for i, s, t in zip(pieces, starting, inside, strict=True)]
        )
    return marked, joined


def _find_inner(normalised: str, places: set[int], longest: float) -> set[int]:
    """Where the letters in words of more than `longest` characters are, but for their first."""
    words = pairwise([*sorted(places), len(normalised)])
    inner = (place for i, j in words if j - i > longest for place in range(i + 1, j))
    return {place for place in inner if unicodedata.category(normalised[place])[0] != "M"}


def _find_words(sentences: list[str], starts: set[int]) -> Iterator[list[int]]:
    """Where each word of each sentence starts, in characters; a sentence starts with a word."""
    at = 0
    for sentence in sentences:
        words = [0]
        for place, char in enumerate(sentence):
            if not char.isspace():
                if place and at in starts:
                    words.append(place)
                at += 1
        yield words


def _normalise_words(sentence: str, words: list[int], vocab: Vocab) -> tuple[str, set[int]]:
    """The normalised sentence, and where each word starts in it; `words` are their places."""
    normalised = vocab.normalise(sentence)
    parts = [vocab.normalise(sentence[i:j]) for i, j in pairwise([*words, len(sentence)])]
    if "".join(parts) == normalised:
        places = accumulate(map(len, parts[:-1]), initial=0)
    else:  # a mark at the start of a word joined with the letter before, or something like it
        places = (len(vocab.normalise(sentence[:i])) for i in words)
    return normalised, {place for place in places if place < len(normalised)}
