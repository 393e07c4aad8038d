"""SQuAD 1.1 and 2.0 as published: articles of paragraphs, each with questions on its context."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from albert_ds.errors import DamagedData, UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class SquadQuestion:
    """A question; `answers` are (text, first character), empty where it cannot be answered."""

    id: str
    text: str
    answers: tuple[tuple[str, int], ...]
    is_impossible: bool


def read_squad(
    path: Path, *, answerable: bool, has_answers: bool = True
) -> Iterator[tuple[str, list[SquadQuestion]]]:
    """(context, questions) of every paragraph.

    Args:
        answerable: 1.1: every question has an answer; 2.0: some have none.
        has_answers: False for a test file, whose answers are ignored.

    Raises UserError where the file cannot be read, DamagedData, with the question's id, where it is
    not SQuAD or an answer is not in its context at its `answer_start`.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    except OSError as error:
        raise UserError(f"--data: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedData(f"{path}: not a file of SQuAD: {error!r}") from None
    where = "the first article"
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                context, questions = paragraph["context"], []
                for entry in paragraph["qas"]:
                    where = f"question {entry['id']}"
                    questions.append(_read_question(path, entry, context, answerable, has_answers))
                yield context, questions
    except (KeyError, TypeError) as error:
        raise DamagedData(f"{path}, at {where}: not a file of SQuAD: {error!r}") from None


def _read_question(path: Path, entry, context: str, answerable: bool, has_answers: bool):
    answers = ()
    if has_answers:
        answers = tuple((a["text"], a["answer_start"]) for a in entry["answers"])
    is_impossible = bool(entry.get("is_impossible", False))
    problem = None
    if has_answers and answerable and not answers:
        problem = "has no answer; SQuAD 1.1 has one to every question"
    elif is_impossible and answers:
        problem = "is marked impossible and has an answer"
    elif has_answers and not is_impossible and not answers:
        problem = "has no answer and is not marked impossible"
    for text, start in answers:
        if not text or context[start : start + len(text)] != text:
            problem = f"answer {text[:40]!r} is not in its context at character {start}"
    if problem:
        raise DamagedData(f"{path}: question {entry['id']}: {problem}")
    return SquadQuestion(
        id=entry["id"], text=entry["question"], answers=answers, is_impossible=is_impossible
    )
