"""Questions on long contexts -> overlapping windows of the context (BERT's procedure).

[CLS] question [SEP] window [SEP]. The next window starts `stride` tokens later, until one reaches
the end of the context. Where a window does not contain the answer, its span is [CLS], as in BERT's
procedure, and under 2.0 it counts as unanswerable.
"""

from collections.abc import Iterator

import numpy as np

from albert_ds.data.vocab import Vocab
from albert_ds.tasks.features import FeatureBuilder, Features
from albert_ds.tasks.squad.dataset import SquadQuestion
from albert_ds.tasks.squad.offsets import OffsetEncoder, cover

CLS_POSITION = 0


def build_squad(paragraphs, vocab: Vocab, lengths, *, with_spans: bool) -> Features:
    """Windows of every (context, questions); for training with `span_starts`, `span_ends` and
    `impossible` [F].

    `token_begin`, `token_end` int32, parallel to `ids`, are the characters of each context token.
    """
    extra = ("span_starts", "span_ends", "impossible") if with_spans else ()
    builder, encoder = FeatureBuilder(*extra), OffsetEncoder(vocab)
    begins: list[np.ndarray] = []
    ends: list[np.ndarray] = []

    def add_text(ids: list[int], first: np.ndarray, after: np.ndarray) -> int:
        begins.append(first)
        ends.append(after)
        return builder.add_text(ids)

    example = 0
    for context, questions in paragraphs:
        ids, first, after = encoder.encode(context)
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
            for low, high in cut_windows(len(ids), room, lengths.stride):
                targets = _target(span, low, high, len(kept) + 2) if with_spans else {}
                builder.add_row(example, asked, (number, low, high), **targets)
            example += 1
    return builder.build(
        token_begin=np.concatenate([np.empty(0, np.int32), *begins]),
        token_end=np.concatenate([np.empty(0, np.int32), *ends]),
    )


def _find_span(builder, context: str, question: SquadQuestion, first, after):
    """The tokens of the first answer; counts whether their text is exactly the answer."""
    text, begin = question.answers[0]
    if len(question.answers) > 1:
        builder.count("questions with more answers than the one trained on")
    span = cover(first, after, begin, begin + len(text))
    if span is not None:
        found = context[first[span[0]] : after[span[1]]]
        same = found == text.strip()
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
    context, on its smaller side, in this window. Of equal windows it is the first, which is never
    shorter than a later one, so BERT's bonus for length changes nothing."""
    low, high = windows[:, :1], windows[:, 1:]
    token = np.arange(windows[:, 1].max(initial=0))
    sides = np.minimum(token - low, high - 1 - token).astype(np.float64)
    score = np.where((token >= low) & (token < high), sides, -np.inf)
    best = score.argmax(0) if len(token) else token
    return [best[a:b] == number for number, (a, b) in enumerate(windows)]
