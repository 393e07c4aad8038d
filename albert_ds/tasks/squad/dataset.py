"""SQuAD 1.1 and 2.0 as published: articles of paragraphs, each with questions on its context."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from albert_ds.base.cli import Range
from albert_ds.base.errors import DamagedData
from albert_ds.base.json_files import read_data

_QUESTION = {"id": str, "question": str}
_ANSWER = {"text": str, "answer_start": Range(ge=0, is_integer=True)}


def _schema_of(question: dict) -> dict:
    return {"data": [{"paragraphs": [{"context": str, "qas": [question]}]}]}


WITHOUT_ANSWERS = _schema_of(_QUESTION)
WITH_ANSWERS = _schema_of({**_QUESTION, "answers": [_ANSWER]})


@dataclass(frozen=True, kw_only=True, slots=True)
class SquadQuestion:
    """A question; `answers` are (text, first character), empty if it cannot be answered."""

    id: str
    text: str
    answers: tuple[tuple[str, int], ...]


def read_squad(
    path: Path, *, answerable: bool, has_answers: bool = True
) -> Iterator[tuple[str, list[SquadQuestion]]]:
    """(context, questions) of every paragraph.

    Args:
        answerable: 1.1: every question has an answer; 2.0: some have none.
        has_answers: False for a test file, whose answers are ignored.

    Raises UserError if the file cannot be read, DamagedData, with field or question, if it is
    not SQuAD, two questions have one id, or an answer is not in its context at its `answer_start`.
    """
    schema = WITH_ANSWERS if has_answers else WITHOUT_ANSWERS
    seen = set()
    for article in read_data(path, schema)["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            questions = [
                _read_question(path, entry, context, answerable, has_answers)
                for entry in paragraph["qas"]
            ]
            for question in questions:  # predictions and scores go by id
                if question.id in seen:
                    raise DamagedData(f"{path}: question {question.id}: the id stands there twice")
                seen.add(question.id)
            yield context, questions


def _read_question(path: Path, entry, context: str, answerable: bool, has_answers: bool):
    answers = ()
    if has_answers:
        answers = tuple((a["text"], int(a["answer_start"])) for a in entry["answers"])
    is_impossible = entry.get("is_impossible", False)
    problem = None
    if not isinstance(is_impossible, bool):
        problem = f"is_impossible is {is_impossible!r}; must be true or false"
    elif has_answers and answerable and not answers:
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
    return SquadQuestion(id=entry["id"], text=entry["question"], answers=answers)
