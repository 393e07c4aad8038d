"""Questions on long contexts -> overlapping windows of the context (BERT's procedure).

[CLS] question [SEP] window [SEP]. The next window starts `stride` tokens later, until one reaches
the end of the context. Where a window does not contain the answer, its span is [CLS], as in BERT's
procedure, and under 2.0 it counts as unanswerable.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from albert_ds.tasks.features import FeatureBuilder, Features
from albert_ds.tasks.squad.dataset import SquadQuestion
from albert_ds.vocab.vocab import COMPOSED_AGAIN, WORD_MARK, Vocab

CLS_POSITION = 0
# Pairs of characters that normalisation makes one.
JOINED = re.compile("|".join(("``", "''", *COMPOSED_AGAIN)))


def build_squad(paragraphs, vocab: Vocab, lengths, *, with_spans: bool) -> Features:
    """Windows of every (context, questions); for training with `span_starts`, `span_ends` and
    `impossible` [F].

    `token_begin`, `token_end` int32, parallel to `ids`, are the characters of each context token.
    """
    extra = ("span_starts", "span_ends", "impossible") if with_spans else ()
    builder = FeatureBuilder(*extra)
    tokenizer = vocab.build_tokenizer(plain=True)
    begins: list[np.ndarray] = []
    ends: list[np.ndarray] = []

    def add_text(ids: list[int], first: np.ndarray, after: np.ndarray) -> int:
        begins.append(first)
        ends.append(after)
        return builder.add_text(ids)

    example = 0
    for context, questions in paragraphs:
        ids, first, after = encode_with_characters(tokenizer, context)
        number = add_text(ids, first, after)
        texts = vocab.encode([question.text for question in questions])
        for question, tokens in zip(questions, texts, strict=True):
            builder.count("examples")
            kept = tokens[: lengths.question]
            if len(kept) < len(tokens):
                builder.count("questions cut at the end")
            none = np.full(len(kept), -1, np.int32)
            asked = (add_text(kept, none, none), 0, len(kept))
            span = None
            if with_spans and question.answers:
                span = _find_span(builder, context, question, first, after)
                if span is None:
                    builder.count("skipped: no token of the answer is left")
                    continue
            room = lengths.sequence - len(kept) - 3
            is_in_one = False
            for low, high in cut_windows(len(ids), room, lengths.stride):
                targets = _target(span, low, high, len(kept) + 2) if with_spans else {}
                is_in_one |= not targets.get("impossible")
                builder.add_row(example, asked, (number, low, high), **targets)
            if span is not None and not is_in_one:
                builder.count("answers in no window, trained as if there were none")
            example += 1
    return builder.build(
        token_begin=np.concatenate([np.empty(0, np.int32), *begins]),
        token_end=np.concatenate([np.empty(0, np.int32), *ends]),
    )


def encode_with_characters(tokenizer: Any, text: str) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The ids of a text; of each token its first character and the one after its last.

    A lone word mark has no character: its two numbers are equal. A character that normalisation
    drops (an accent, a zero-width space) belongs to the token before it, or after white space to
    the one behind it.

    Args:
        tokenizer: of `Vocab.build_tokenizer(plain=True)`.
    """
    encoding = tokenizer.encode(text)
    spans = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    first, after = spans[:, 0].copy(), spans[:, 1].copy()
    is_mark = np.array(encoding.ids) == tokenizer.token_to_id(WORD_MARK)
    # Of two characters that became one, the library names the second; the first has no token.
    seconds = [pair.start() + 1 for pair in JOINED.finditer(text)]
    first -= np.isin(first, seconds) & ~np.isin(first, after[~is_mark])
    after[is_mark] = first[is_mark]
    real = np.flatnonzero(~is_mark)
    begins = np.append(first[real], len(text))
    ends = after[real]
    for number in np.flatnonzero(ends < begins[1:]).tolist():
        end = ends[number]
        begin = begins[number + 1]
        lost = re.split(r"\s+", text[end:begin])
        # Several tokens may stand for one character: its bytes, or the parts of a fraction.
        if lost[0]:
            after[real[ends == end]] += len(lost[0])
        if len(lost) > 1 and lost[-1]:
            first[real[begins[:-1] == begin]] -= len(lost[-1])
    return encoding.ids, first, after


def cover(first: np.ndarray, after: np.ndarray, begin: int, end: int) -> tuple[int, int] | None:
    """The smallest run of tokens (first, last) that covers characters [begin, end).

    None if no token stands for any of them.
    """
    touching = np.flatnonzero((first < end) & (after > begin) & (first < after))
    return (int(touching[0]), int(touching[-1])) if len(touching) else None


def _find_span(builder, context: str, question: SquadQuestion, first, after):
    """The tokens of the first answer; counts whether their text is exactly the answer."""
    text, begin = question.answers[0]
    if len(question.answers) > 1:
        builder.count("questions with more answers than the one trained on")
    span = cover(first, after, begin, begin + len(text))
    if span is not None:
        answer = context[first[span[0]] : after[span[1]]]
        same = answer == text.strip()
        builder.count("answers recovered exactly" if same else "answers recovered as a wider span")
    return span


def cut_windows(length: int, room: int, stride: int) -> Iterator[tuple[int, int]]:
    """The windows [low, high) of at most `room` tokens over `length`; at least one."""
    low = 0
    while True:
        high = min(low + room, length)
        yield low, high
        if high == length:
            return
        low += min(room, stride)


def _target(span: tuple[int, int] | None, low: int, high: int, offset: int) -> dict[str, int]:
    if span is None or not (low <= span[0] and span[1] < high):
        return {"span_starts": CLS_POSITION, "span_ends": CLS_POSITION, "impossible": 1}
    start, end = (position - low + offset for position in span)
    return {"span_starts": start, "span_ends": end, "impossible": 0}


def most_context(windows: np.ndarray) -> list[np.ndarray]:
    """For each window [low, high) of a question a bool per token: whether the token has most
    context, on its smaller side, in this window, of equal ones the first. As in BERT a token of the
    window's length counts 0.01: the last window may be shorter."""
    low = windows[:, :1]
    high = windows[:, 1:]
    token = np.arange(windows[:, 1].max(initial=0))
    context = np.minimum(token - low, high - 1 - token) + 0.01 * (high - low)
    score = np.where((token >= low) & (token < high), context, -np.inf)
    best = score.argmax(0) if len(token) else token
    return [best[a:b] == number for number, (a, b) in enumerate(windows)]
