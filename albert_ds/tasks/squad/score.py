"""Exact match (EM) and F1 of SQuAD by their official definitions, and the no-answer threshold.

Answers are compared without case, punctuation, articles and superfluous white space. F1 is over
words. A question scores with the reference answer that matches best.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

from albert_ds.tasks.squad.dataset import SquadQuestion

ARTICLES = re.compile(r"\b(a|an|the)\b")
METRICS = ("exact", "f1")  # in the order of a score's pair
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def simplify(answer: str) -> str:
    """The part of an answer that is compared."""
    bare = answer.lower().translate(NO_PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", bare).split())


def exact(reference: str, predicted: str) -> float:
    return float(simplify(reference) == simplify(predicted))


def f1(reference: str, predicted: str) -> float:
    """Harmonic mean of precision and recall over words; 1 if neither has any, as in 2.0."""
    wanted, words = simplify(reference).split(), simplify(predicted).split()
    if not wanted or not words:
        return float(wanted == words)
    common = sum((Counter(wanted) & Counter(words)).values())
    return 2 * common / (len(wanted) + len(words))


def score_answers(
    questions: Iterable[SquadQuestion], predicted: dict[str, str], *, answerable: bool
) -> dict[str, tuple[float, float]]:
    """(EM, F1) from 0 to 1 of every question that has a prediction.

    The versions differ if an answer simplifies to nothing. Under 2.0 such a reference does not
    count, and "" is the right answer to a question without references. Under 1.1 (`answerable`)
    such a reference counts like any other and has an F1 of 0.
    """
    scores = {}
    for question in questions:
        references = [text for text, _ in question.answers if answerable or simplify(text)] or [""]
        answer = predicted.get(question.id)
        if answer is None:
            continue
        overlap = best(f1, references, answer) if simplify(answer) or not answerable else 0.0
        scores[question.id] = (best(exact, references, answer), overlap)
    return scores


def best(measure: Callable[[str, str], float], references: list[str], answer: str) -> float:
    return max(measure(reference, answer) for reference in references)


def summarise(scores: dict[str, tuple[float, float]], num_questions: int) -> dict[str, float]:
    """`exact` and `f1` in percent over all questions; one without a prediction scores 0.

    The official script of 1.1 counts like this. That of 2.0 leaves questions without a prediction
    out of the mean: if there are any, the result also has `exact_predicted` and `f1_predicted`,
    over the predicted questions alone, and `questions_without_prediction`, their number.
    """
    totals = {name: 100 * sum(s[i] for s in scores.values()) for i, name in enumerate(METRICS)}
    metrics = {name: total / max(num_questions, 1) for name, total in totals.items()}
    if missing := num_questions - len(scores):
        for name, total in totals.items():
            metrics[f"{name}_predicted"] = total / max(len(scores), 1)
        metrics["questions_without_prediction"] = missing
    return metrics


def find_threshold(
    values: dict[str, float],
    null_odds: dict[str, float],
    answerable: dict[str, bool],
    predicted: dict[str, str],
) -> tuple[float, float]:
    """The best mean score in percent, and the null odds above which a question gets no answer.

    Args:
        values: the score from 0 to 1 of each predicted answer.
        null_odds: how likely it is, as a logit, that a question has no answer.
        answerable: whether it has one.
        predicted: the answers' texts.

    The official search, step by step: it starts from no answer to any question (a threshold below
    all odds; there 0, as its odds are probabilities) and adds the answers in the order of their
    null odds. An answer to an unanswerable question costs a point there, also where it simplifies
    to nothing ("the") and so scores as right; the mean is over the predicted questions.
    """
    score = top = float(sum(not has for has in answerable.values()))
    threshold = min(null_odds.values(), default=0.0) - 1
    for question in sorted(null_odds, key=lambda name: null_odds[name]):
        if question not in values:
            continue
        if answerable[question]:
            score += values[question]
        else:
            score -= bool(predicted[question])
        if score > top:
            top = score
            threshold = null_odds[question]
    return 100.0 * top / max(len(values), 1), threshold
