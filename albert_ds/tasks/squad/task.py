"""SQuAD 1.1 and 2.0 as tasks: files, windows, answers, scores, prediction files."""

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from albert_ds.base.files import write_file
from albert_ds.tasks.features import Features, Split
from albert_ds.tasks.recipes import Lengths
from albert_ds.tasks.squad.answers import best_spans, conditional_spans, linear_spans, name_answers
from albert_ds.tasks.squad.dataset import read_squad
from albert_ds.tasks.squad.score import find_threshold, score_answers, summarise
from albert_ds.tasks.squad.windows import build_squad
from albert_ds.vocab.vocab import Vocab


@dataclass(frozen=True, kw_only=True, slots=True)
class SquadTask:
    """One of the two versions. Under 2.0 a question may have no answer."""

    version: str  # as in the files' names
    answerable: bool  # every question has an answer
    published: dict[str, int]

    labels = ()
    metrics = ("f1", "exact")
    dev_splits = ("dev",)
    test_splits = ("test",)
    has_test_labels = False

    @property
    def head(self) -> str:
        return "span" if self.answerable else "conditional_span"

    def files(self, data: Path, split: str) -> list[Path]:
        return [data / f"{split}-{self.version}.json"]

    def _read(self, data: Path, split: str):
        path = self.files(data, split)[0]
        has_answers = not split.startswith("test")
        return read_squad(path, answerable=self.answerable, has_answers=has_answers)

    def count_examples(self, data: Path) -> int:
        """Questions of the training set. Raises DamagedData."""
        return sum(len(questions) for _, questions in self._read(data, "train"))

    def build(self, data: Path, split: str, vocab: Vocab, lengths: Lengths) -> Features:
        """Windows over a split."""
        return build_squad(self._read(data, split), vocab, lengths, with_spans=split == "train")

    def answer(self, split: Split, outputs: dict) -> tuple[dict[str, list[dict]], dict[str, float]]:
        """The n best answers of every question by its id, and its null odds (empty under 1.1)."""
        make = linear_spans if self.answerable else conditional_spans
        spans = best_spans(split.features, make(split.features, outputs), split.lengths.answer)
        paragraphs = self._read(split.data, split.name)
        asked = [(question.id, context) for context, qs in paragraphs for question in qs]
        answers = {
            name: name_answers(best, context)
            for (name, context), best in zip(asked, spans, strict=True)
        }
        if self.answerable:
            return answers, {}
        odds = np.full(len(asked), np.inf)
        # A question's odds are the lowest of its windows (the release does the same).
        np.minimum.at(odds, split.features.arrays["example"], outputs["impossible"])
        return answers, {name: float(x) for (name, _), x in zip(asked, odds, strict=True)}

    def score(self, split: Split, outputs: dict) -> dict[str, float]:
        """Official EM and F1 in percent; under 2.0 at the `threshold` with the best F1."""
        answers, odds = self.answer(split, outputs)
        read = self._read(split.data, split.name)
        questions = list(chain.from_iterable(qs for _, qs in read))
        predicted = {name: best[0]["text"] for name, best in answers.items()}
        scores = score_answers(questions, predicted, answerable=self.answerable)
        if self.answerable:
            return summarise(scores, len(questions))
        has = {question.id: bool(question.answers) for question in questions}
        f1s = {name: pair[1] for name, pair in scores.items()}
        _, threshold = find_threshold(f1s, odds, has, predicted)
        final = score_answers(questions, withhold(predicted, odds, threshold), answerable=False)
        parts = {}
        for label, wanted in (("answerable", True), ("unanswerable", False)):
            group = {name: pair for name, pair in final.items() if has[name] is wanted}
            part = summarise(group, list(has.values()).count(wanted))
            parts |= {f"{name}_{label}": value for name, value in part.items()}
        return {**summarise(final, len(questions)), **parts, "threshold": threshold}

    def write(self, split: Split, outputs: dict, folder: Path, metrics: dict) -> None:
        """Write predictions, n-best and, under 2.0, null odds, in the official formats.

        `metrics` are those of the dev set: its threshold decides which questions stay unanswered.
        """
        answers, odds = self.answer(split, outputs)
        predicted = {name: best[0]["text"] for name, best in answers.items()}
        contents: dict[str, dict] = {"predictions": predicted, "nbest": answers}
        if not self.answerable:
            contents["predictions"] = withhold(predicted, odds, metrics["threshold"])
            contents["null_odds"] = odds
        for name, content in contents.items():
            write_file(folder / f"{name}.{split.name}.json", json.dumps(content) + "\n")


def withhold(predicted: dict[str, str], odds: dict[str, float], threshold: float) -> dict[str, str]:
    """The answers, empty if the null odds are above the threshold."""
    return {name: "" if odds[name] > threshold else text for name, text in predicted.items()}


SQUAD = {
    "squad1": SquadTask(version="v1.1", answerable=True, published={"train": 87599, "dev": 10570}),
    "squad2": SquadTask(
        version="v2.0", answerable=False, published={"train": 130319, "dev": 11873}
    ),
}
