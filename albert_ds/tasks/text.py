"""`--task text`: classes or scores of the user's own, for texts or pairs of texts.

Columns are `text`, or `text_a` and `text_b`, and `label`. The classes are those of the training
set. Labels that are numbers, one of them with a decimal point, are scores: regression. Whole
numbers alone are classes, as in Hugging Face's scripts. Beside scores a word is refused: one "NA"
would make a class of every score.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from albert_ds.base.errors import UserError
from albert_ds.base.files import write_file
from albert_ds.tasks.features import FeatureBuilder, Features, Split, encode_examples
from albert_ds.tasks.glue import score_glue
from albert_ds.tasks.labelled import find_file, need_one, read_examples, read_text, write_scores
from albert_ds.tasks.recipes import Lengths
from albert_ds.vocab.vocab import Vocab

ENDINGS = (".csv", ".tsv", ".jsonl")
PAIR = ("text_a", "text_b")
LARGEST_SCORE = 1e18  # the square of a difference stays finite in fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTask:
    """Classes by their words, or scores if there are none."""

    labels: tuple[str, ...]

    dev_splits = ("dev",)
    test_splits = ("test",)
    has_test_labels = True  # if the file has them
    published = {}

    @classmethod
    def open(cls, data: Path) -> "TextTask":
        """The task of the labels in the training set."""
        counts = Counter(str(label) for *_, label in _read(data, "train"))
        words = [label for label in counts if _as_number(label) is None]
        if score := next((label for label in counts if "." in label and label not in words), None):
            if words:
                raise UserError(
                    f"--data {data}: the training set has labels such as {score!r}, a score, and "
                    f"{words[0]!r}, a class; must be the one or the other"
                )
            return cls(labels=())
        if len(counts) < 2:
            raise UserError(f"--data {data}: the training set has one label, {min(counts)!r}")
        return cls(labels=tuple(sorted(counts)))

    @property
    def head(self) -> str:
        return "classification" if self.labels else "regression"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy", "f1_macro") if self.labels else ("pearson", "spearman")

    def files(self, data: Path, split: str) -> list[Path]:
        return [find_file(data, split, ENDINGS)]

    def count_examples(self, data: Path) -> int:
        """Examples of the training set."""
        return sum(1 for _ in _read(data, "train"))

    def build(self, data: Path, split: str, vocab: Vocab, lengths: Lengths) -> Features:
        """Tokenise a split; a test set may have no labels."""
        builder = FeatureBuilder()
        labels = []
        number = 0
        encoded = encode_examples(_read(data, split), lambda example: example[1], vocab)
        for number, ((where, _, label), texts) in enumerate(encoded, 1):
            builder.add_example(number - 1, texts, lengths.sequence)
            if label is not None:
                labels.append(self._read_label(label, where))
        builder.count("examples", number)
        if len(labels) not in (0, number):
            raise UserError(
                f"{self.files(data, split)[0]}: {len(labels)} of {number} examples have a label; "
                "must be all or none"
            )
        if self.labels and labels:
            counts = Counter(labels).most_common()
            builder.count("classes", len(counts))
            for which, (label, count) in (("most frequent", counts[0]), ("rarest", counts[-1])):
                builder.count(f"of the {which} ({self.labels[int(label)]})", count)
        elif labels:
            builder.count("with a score (regression)", len(labels))
        kind = np.int64 if self.labels else np.float32
        return builder.build(choices=1, **({"labels": np.array(labels, kind)} if labels else {}))

    def _read_label(self, label: str, where: str) -> float:
        if self.labels:
            if label not in self.labels:
                known = ", ".join(self.labels)[:200]
                raise UserError(f"{where}: label {label!r} is not in the training set: {known}")
            return self.labels.index(label)
        value = _as_number(label)
        if value is None:
            raise UserError(f"{where}: label {label!r}: must be a number, as in the training set")
        return value

    def score(self, split: Split, outputs: dict) -> dict[str, float]:
        """The metrics over logits [F, labels]; none for a test set without labels."""
        labels = split.features.arrays.get("labels")
        return {} if labels is None else score_glue(self.metrics, outputs["logits"], labels)

    def write(self, split: Split, outputs: dict, folder: Path, metrics: dict) -> None:
        """Write the prediction for every example, and the scores with their intervals."""
        logits = outputs["logits"]
        labels = split.features.arrays.get("labels")
        chosen = logits.argmax(1)
        if self.labels:
            shares = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)  # of the largest
            head = ("example", "prediction", "probability")
            columns = [[self.labels[k] for k in chosen], [f"{share:.4f}" for share in shares]]
        else:
            head = ("example", "prediction")
            columns = [[f"{x:.6g}" for x in logits[:, 0]]]
        table = io.StringIO()
        rows = zip(range(len(logits)), *columns, strict=True)
        csv.writer(table, lineterminator="\n").writerows([head, *rows])
        write_file(folder / f"predictions.{split.name}.csv", table.getvalue())
        if labels is None:
            return

        def correlate(picks) -> dict[str, float]:
            return score_glue(self.metrics, logits[picks], labels[picks])

        parts = {"classes": self._count_classes(chosen, labels)} if self.labels else {}
        measure = self._measure_classes(chosen, labels) if self.labels else correlate
        write_scores(folder / f"scores.{split.name}.json", len(labels), measure, **parts)

    def _measure_classes(self, chosen: np.ndarray, labels: np.ndarray) -> Callable:
        """The scores of a draw of the examples; a class that it lacks has its F1 of all of them.

        Left out, rare classes that are never found would double the macro F1 of such a draw.
        """
        from sklearn.metrics import f1_score

        def measure(picks) -> dict[str, float]:
            one, other = labels[picks], chosen[picks]
            by_class = f1_score(one, other, labels=numbers, average=None, zero_division=np.nan)
            f1s = np.where(np.isnan(by_class), whole, by_class)
            return {"accuracy": float((one == other).mean()), "f1_macro": float(np.nanmean(f1s))}

        numbers = range(len(self.labels))
        whole = f1_score(labels, chosen, labels=numbers, average=None, zero_division=np.nan)
        return measure

    def _count_classes(self, chosen: np.ndarray, labels: np.ndarray) -> dict[str, dict]:
        from sklearn.metrics import precision_recall_fscore_support

        numbers = range(len(self.labels))
        measures = precision_recall_fscore_support(
            labels, chosen, labels=numbers, zero_division=0.0
        )
        names = ("precision", "recall", "f1", "examples")
        columns = zip(*(column.tolist() for column in measures), strict=True)
        return {
            label: dict(zip(names, column, strict=True))
            for label, column in zip(self.labels, columns, strict=True)
        }


def _read(data: Path, split: str) -> Iterator[tuple[str, list[str], str | None]]:
    """(file and line, texts, label) of each example; only those of a test set may lack it.

    Texts or pairs, as in the first row of the training set.
    """
    columns = PAIR if PAIR[0] in next(_read_rows(data, "train"))[1] else ("text",)
    for where, row in _read_rows(data, split):
        texts = [read_text(where, row, column) for column in columns]
        label = row.get("label")
        if split == "test" and label in (None, ""):
            label = None
        elif isinstance(label, int | float) and not isinstance(label, bool):  # of JSON lines
            label = str(label)
        else:
            label = read_text(where, row, "label")
            if not label or label != label.strip():
                raise UserError(f"{where}: label {label!r}: must be text without blanks around it")
        yield where, texts, label


def _read_rows(data: Path, split: str) -> Iterator[tuple[str, dict]]:
    path = find_file(data, split, ENDINGS)
    return need_one(path, read_examples(path))


def _as_number(label: str) -> float | None:
    with suppress(ValueError):
        value = float(label)
        return value if abs(value) <= LARGEST_SCORE else None
    return None
