"""EM and F1 of SQuAD by their official definitions, and the threshold that serves F1 best.

Answers are compared without case, punctuation, articles and superfluous white space; F1 is over
words. A question counts with its best reference answer.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

from albert_ds.tasks.squad import SquadQuestion

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def simplify(answer: str) -> str:
    """What of an answer is compared."""
    bare = answer.lower().translate(NO_PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", bare).split())


def exact(reference: str, predicted: str) -> float:
    return float(simplify(reference) == simplify(predicted))


def f1(reference: str, predicted: str) -> float:
    """Harmonic mean of precision and recall over words; 1 where neither has any, as in 2.0."""
    wanted, found = simplify(reference).split(), simplify(predicted).split()
    if not wanted or not found:
        return float(wanted == found)
    common = sum((Counter(wanted) & Counter(found)).values())
    return 2 * common / (len(wanted) + len(found))


def score_answers(
    questions: Iterable[SquadQuestion], predicted: dict[str, str], *, answerable: bool
) -> dict[str, tuple[float, float]]:
    """(EM, F1) from 0 to 1 of every question; one without a prediction scores 0.

    The versions differ where an answer simplifies to nothing: under 2.0 such a reference does not
    count and nothing is the right answer to a question without one; under 1.1 (`answerable`) it
    counts like any other and has an F1 of 0.
    """
    scores = {}
    for question in questions:
        references = [text for text, _ in question.answers if answerable or simplify(text)] or [""]
        answer = predicted.get(question.id)
        if answer is None:
            scores[question.id] = (0.0, 0.0)
            continue
        overlap = best(f1, references, answer) if simplify(answer) or not answerable else 0.0
        scores[question.id] = (best(exact, references, answer), overlap)
    return scores


def best(measure: Callable[[str, str], float], references: list[str], answer: str) -> float:
    return max(measure(reference, answer) for reference in references)


def average(scores: Iterable[tuple[float, float]]) -> dict[str, float]:
    """EM and F1 in percent, as the official scripts print them."""
    pairs = list(scores)
    return {
        name: 100.0 * sum(pair[i] for pair in pairs) / max(len(pairs), 1)
        for i, name in enumerate(("exact", "f1"))
    }


def find_threshold(
    values: dict[str, float], null_odds: dict[str, float], answerable: dict[str, bool]
) -> tuple[float, float]:
    """The best mean score in percent, and the null odds above which a question gets no answer.

    Args:
        values: the score of each question's answer, were it given.
        null_odds: how much speaks against there being one.
        answerable: whether there is one.

    Starts from answering nothing and goes through the questions by rising odds, as the official
    script does.
    """
    score = top = float(sum(not has for has in answerable.values()))
    threshold = 0.0
    for question in sorted(null_odds, key=lambda name: null_odds[name]):
        score += values[question] - (not answerable[question])
        if score > top:
            top, threshold = score, null_odds[question]
    return 100.0 * top / max(len(answerable), 1), threshold
