"""GLUE: nine tasks over sentences or pairs of sentences, read from the published files.

Every task is a row of one table. Headers differ between splits (CoLA has one in its test file
only), so columns are found by name. Predictions are written in the leaderboard's format. The
diagnostic set has no training data: it is another test set of MNLI, submitted as AX.tsv.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import write_file
from albert_ds.tasks.features import FeatureBuilder, Features, Split, encode_examples
from albert_ds.tasks.recipes import Lengths
from albert_ds.vocab.vocab import Vocab

ENTAILMENT = ("entailment", "not_entailment")
DIAGNOSTIC = "test_diagnostic"
# In MNLI's folder or beside it, under its present or its first published name.
DIAGNOSTIC_FILES = ("diagnostic.tsv", "AX.tsv", "../diagnostic/diagnostic.tsv")
SUBMITTED = {"": "", "matched": "-m", "mismatched": "-mm"}  # endings of submitted files' names


@dataclass(frozen=True, kw_only=True, slots=True)
class GlueTask:
    """One of the nine tasks: its columns, labels, metrics and names of files."""

    folder: str  # its name in GLUE's archive and leaderboard
    published: dict[str, int]  # examples of each split
    texts: tuple[str, ...] = ("sentence1", "sentence2")  # columns of A and, for pairs, B
    labels: tuple[str, ...] = ("0", "1")  # in the order of their numbers; none: a score, 0 to 5
    label_column: str = "label"
    metrics: tuple[str, ...] = ("accuracy",)  # the first decides which evaluation is best
    headless: tuple[str, ...] = ()  # all columns, if train and dev have no header
    tolerance: float = 0.0  # share of malformed rows that the published training file may have
    has_test_labels: bool = False

    @property
    def head(self) -> str:
        return "classification" if self.labels else "regression"

    @property
    def dev_splits(self) -> tuple[str, ...]:
        return tuple(name for name in self.published if name.startswith("dev"))

    @property
    def test_splits(self) -> tuple[str, ...]:
        return tuple(name for name in self.published if name.startswith("test"))

    def files(self, data: Path, split: str) -> list[Path]:
        names = DIAGNOSTIC_FILES if split == DIAGNOSTIC else (f"{split}.tsv",)
        return [next((data / name for name in names if (data / name).is_file()), data / names[0])]

    def _label(self, row: dict[str, str], path: Path, line: int) -> float:
        word = row[self.label_column]
        if self.labels:
            if word not in self.labels:
                raise UserError(
                    f"{path}, line {line}: label {word!r}; must be one of "
                    f"{', '.join(self.labels)}; labels of your own are --task text"
                )
            return float(self.labels.index(word))
        try:
            score = float(word)
        except ValueError:
            score = float("nan")
        if not 0 <= score <= 5:
            raise UserError(f"{path}, line {line}: score {word!r}; must be from 0 to 5")
        return score

    def _read(
        self, data: Path, split: str, skipped: list[int]
    ) -> Iterator[tuple[int, dict[str, str]]]:
        """`_read_rows` of a split."""
        is_test = split.startswith("test")
        has_header = is_test or not self.headless
        columns = (*self.texts, *(() if is_test else (self.label_column,)))
        names = columns if has_header else self.headless
        tolerance = self.tolerance if split == "train" else 0.0
        return _read_rows(self.files(data, split)[0], names, has_header, tolerance, skipped)

    def count_examples(self, data: Path) -> int:
        """Examples of the training set. Raises DamagedData."""
        return sum(1 for _ in self._read(data, "train", []))

    def build(self, data: Path, split: str, vocab: Vocab, lengths: Lengths) -> Features:
        """Tokenise a split; the label of a test file is 0.

        Raises UserError or DamagedData with the file and the line.
        """
        is_test = split.startswith("test")
        path = self.files(data, split)[0]
        skipped = []
        rows = self._read(data, split, skipped)
        builder = FeatureBuilder()
        labels = []
        encoded = encode_examples(rows, lambda row: [row[1][name] for name in self.texts], vocab)
        for (line, row), texts in encoded:
            builder.add_example(len(labels), texts, lengths.sequence)
            labels.append(0.0 if is_test else self._label(row, path, line))
        builder.count("examples", len(labels))
        if skipped:
            builder.count("skipped: wrong number of fields", len(skipped))
        kind = np.int64 if self.labels else np.float32
        return builder.build(labels=np.array(labels, kind))

    def score(self, split: Split, outputs: dict) -> dict[str, float]:
        """The official metrics over logits [F, labels]."""
        suffix = "_mm" if split.name.endswith("_mismatched") else ""
        scores = score_glue(self.metrics, outputs["logits"], split.features.arrays["labels"])
        return {f"{name}{suffix}": value for name, value in scores.items()}

    def write(self, split: Split, outputs: dict, folder: Path, metrics: dict) -> None:
        """The leaderboard's file: a header, then index and prediction of every example."""
        logits = outputs["logits"]
        if self.labels:
            words = [self.labels[number] for number in logits.argmax(1)]
        else:
            words = [f"{score:.3f}" for score in logits[:, 0].clip(0, 5)]
        kind, _, which = split.name.partition("_")
        name = "AX" if split.name == DIAGNOSTIC else self.folder + SUBMITTED[which]
        path = folder / (f"{name}.tsv" if kind == "test" else f"{name}.{kind}.tsv")
        lines = [f"{index}\t{word}\n" for index, word in enumerate(words)]
        write_file(path, "index\tprediction\n" + "".join(lines))


GLUE: dict[str, GlueTask] = {
    "cola": GlueTask(
        folder="CoLA",
        texts=("sentence",),
        metrics=("matthews",),
        headless=("source", "label", "original_mark", "sentence"),
        published={"train": 8551, "dev": 1043, "test": 1063},
    ),
    "sst2": GlueTask(
        folder="SST-2", texts=("sentence",), published={"train": 67349, "dev": 872, "test": 1821}
    ),
    "mrpc": GlueTask(
        folder="MRPC",
        texts=("#1 String", "#2 String"),
        label_column="Quality",
        metrics=("accuracy", "f1"),
        published={"train": 3668, "dev": 408, "test": 1725},
    ),
    "stsb": GlueTask(
        folder="STS-B",
        labels=(),
        label_column="score",
        metrics=("pearson", "spearman"),
        published={"train": 5749, "dev": 1500, "test": 1379},
    ),
    "qqp": GlueTask(
        folder="QQP",
        texts=("question1", "question2"),
        label_column="is_duplicate",
        metrics=("accuracy", "f1"),
        published={"train": 363849, "dev": 40430, "test": 390965},
        tolerance=0.001,
    ),
    "mnli": GlueTask(
        folder="MNLI",
        labels=("contradiction", "entailment", "neutral"),
        label_column="gold_label",
        published={
            "train": 392702,
            "dev_matched": 9815,
            "dev_mismatched": 9832,
            "test_matched": 9796,
            "test_mismatched": 9847,
            DIAGNOSTIC: 1104,
        },
    ),
    "qnli": GlueTask(
        folder="QNLI",
        texts=("question", "sentence"),
        labels=ENTAILMENT,
        published={"train": 104743, "dev": 5463, "test": 5463},
    ),
    "rte": GlueTask(
        folder="RTE", labels=ENTAILMENT, published={"train": 2490, "dev": 277, "test": 3000}
    ),
    "wnli": GlueTask(folder="WNLI", published={"train": 635, "dev": 71, "test": 146}),
}


def _read_rows(
    path: Path, names: tuple[str, ...], has_header: bool, tolerance: float, skipped: list[int]
) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, {column: field}) of every row; no field is quoted.

    names: the columns that are needed; without a header all, in order. tolerance: the share of rows
    that may have a wrong number of fields; `skipped` gets their lines. Raises UserError if the file
    cannot be read, DamagedData, with the line, if a row or the header is wrong.
    """
    columns = list(names)
    total = 0
    try:
        # Not utf-8-sig: some files have a mark in the middle of the table, which is text.
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                line = line.rstrip("\r\n")
                fields = (line.removeprefix("\ufeff") if number == 1 else line).split("\t")
                if number == 1 and has_header:
                    columns = fields
                    if wrong := [name for name in names if columns.count(name) != 1]:
                        has = "two columns" if wrong[0] in columns else "no column"
                        raise DamagedData(
                            f"{path}, line 1: the header has {has} {wrong[0]!r}; it has "
                            f"{', '.join(columns)[:200]}"
                        )
                    continue
                total += 1
                if len(fields) == len(columns):
                    yield number, dict(zip(columns, fields, strict=True))
                elif tolerance:
                    skipped.append(number)
                else:
                    raise DamagedData(
                        f"{path}, line {number}: {len(fields)} fields, must be {len(columns)}"
                    )
    except OSError as error:
        raise UserError(f"--data: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DamagedData(f"{path}: not UTF-8: {error.reason}") from None
    if len(skipped) > max(1, tolerance * total):
        raise DamagedData(
            f"{path}: {len(skipped)} of {total} rows have a wrong number of fields, the first in "
            f"line {skipped[0]}"
        )


def score_glue(names: tuple[str, ...], logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The named metrics, each from -1 or 0 to 1, over logits [F, labels] (or [F, 1]: scores)."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    scored = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)

    def correlate(measure) -> float:
        # A constant has no correlation; 0 as in Matthews' coefficient.
        return measure(labels, scored)[0] if np.ptp(scored) and np.ptp(labels) else 0.0

    metrics = {
        "matthews": lambda: matthews_corrcoef(labels, scored),
        "accuracy": lambda: accuracy_score(labels, scored),
        "f1": lambda: f1_score(labels, scored, zero_division=0.0),
        "f1_macro": lambda: f1_score(labels, scored, average="macro", zero_division=0.0),
        "pearson": lambda: correlate(pearsonr),
        "spearman": lambda: correlate(spearmanr),
    }
    return {name: float(metrics[name]()) for name in names}
