"""From scores of tokens to answers: the n best spans of every question over all of its windows.

A span counts only in the window where its first token has most context (BERT). The text of an
answer is a part of the original context, as it was written.
"""

from collections.abc import Iterator

import numpy as np

from albert_ds.tasks.features import Features
from albert_ds.tasks.squad.windows import most_context

NUM_BEST = 20  # spans kept a question, and starts and ends combined a window


def linear_spans(features: Features, outputs: dict) -> Iterator[tuple]:
    """SQuAD 1.1: starts and ends are scored separately, `start` and `end` float [all tokens].

    Yields (starts, ends, scores) of the NUM_BEST x NUM_BEST spans of each sequence; positions count
    from [CLS], scores are sums of two logits.
    """
    stops = np.cumsum(features.lengths)
    for low, high in zip(stops - features.lengths, stops, strict=True):
        start, end = outputs["start"][low:high], outputs["end"][low:high]
        starts, ends = top(start), top(end)
        pairs = np.meshgrid(starts, ends, indexing="ij")
        yield pairs[0].ravel(), pairs[1].ravel(), (start[pairs[0]] + end[pairs[1]]).ravel()


def conditional_spans(features: Features, outputs: dict) -> Iterator[tuple]:
    """SQuAD 2.0: `start_index`, `start_score` [F, K], `end_index`, `end_score` [F, K, K].

    Yields as `linear_spans` does; scores are log probabilities of start, and of end given start.
    """
    beams = outputs["end_index"].shape[2]
    for row in range(len(outputs["start_index"])):
        starts = np.repeat(outputs["start_index"][row], beams)
        scores = np.repeat(outputs["start_score"][row], beams) + outputs["end_score"][row].ravel()
        yield starts, outputs["end_index"][row].ravel(), scores


def top(scores: np.ndarray) -> np.ndarray:
    """Indices of the NUM_BEST highest, highest first."""
    count = min(NUM_BEST, len(scores))
    best = np.argpartition(-scores, count - 1)[:count]
    return best[np.argsort(-scores[best], kind="stable")]


def best_spans(features: Features, spans: Iterator[tuple], longest: int) -> list[list[tuple]]:
    """The NUM_BEST (score, first character, character after the last) of each question, best first.

    `longest` is in tokens. A question may have none.
    """
    rows, example = features.arrays["rows"], features.arrays["example"]
    best = []
    for windows in np.split(rows, np.flatnonzero(np.diff(example)) + 1):
        candidates = []
        for window, good in zip(windows, most_context(windows[:, 4:]), strict=True):
            candidates += _spans_in(features, window, good, next(spans), longest)
        best.append(sorted(candidates, key=lambda span: -span[0])[:NUM_BEST])
    return best


def _spans_in(features: Features, window, good: np.ndarray, scored: tuple, longest: int) -> list:
    """The valid spans of one window, in characters of the context."""
    starts, ends, scores = scored
    size = window[5] - window[4]
    shift = window[2] - window[1] + 2  # [CLS] question [SEP]
    starts, ends = starts - shift, ends - shift
    valid = (starts >= 0) & (starts <= ends) & (ends < size) & (ends - starts < longest)
    starts, ends, scores = starts[valid], ends[valid], scores[valid]
    inside = good[starts]
    starts, ends, scores = starts[inside], ends[inside], scores[inside]
    order = np.argsort(-scores, kind="stable")[:NUM_BEST]
    text = features.text(int(window[3]))
    first = features.arrays["token_begin"][text][window[4] + starts[order]]
    after = features.arrays["token_end"][text][window[4] + ends[order]]
    return list(zip(scores[order].tolist(), first.tolist(), after.tolist(), strict=True))


def name_answers(spans: list[tuple], context: str) -> list[dict]:
    """The distinct answers of one question, best first: text, score, probability among them."""
    answers: dict[str, float] = {}
    for score, first, after in spans:
        text = context[first:after].strip()
        if text and text not in answers:
            answers[text] = score
    if not answers:
        return [{"text": "", "score": 0.0, "probability": 1.0}]
    scores = np.array(list(answers.values()))
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    return [
        {"text": text, "score": score, "probability": float(share)}
        for (text, score), share in zip(answers.items(), shares, strict=True)
    ]
