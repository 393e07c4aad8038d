"""RACE: questions on a passage with four options each; scored for both school levels and in all.

As released: segment A is the passage, segment B question and option. An option replaces every "_"
in its question, or follows it. B keeps its last 128 tokens, the passage its first.
"""

from itertools import islice
from pathlib import Path

import numpy as np

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import write_json
from albert_ds.base.json_files import read_data
from albert_ds.tasks.features import FeatureBuilder, Features, Split
from albert_ds.tasks.recipes import Lengths
from albert_ds.vocab.vocab import Vocab

LEVELS = ("middle", "high")
OPTIONS = "ABCD"
SCHEMA = {
    "article": str,
    "questions": [str],
    "options": [[str] * len(OPTIONS)],
    "answers": [tuple(OPTIONS)],
}


class RaceTask:
    """Reads RACE in its archive's layout: {train,dev,test}/{middle,high}/*.txt, each JSON."""

    head = "choice"
    labels = tuple(OPTIONS)
    metrics = ("accuracy",)
    dev_splits = ("dev",)
    test_splits = ("test",)
    has_test_labels = True
    published = {"train": 87866, "dev": 4887, "test": 4934}

    def files(self, data: Path, split: str) -> list[Path]:
        """All passages of a split. A missing level is left out; `build` counts both levels."""
        passages = [p for level in LEVELS for p in sorted((data / split / level).glob("*.txt"))]
        if not passages:
            folders = " or ".join(f"{data / split / level}" for level in LEVELS)
            raise UserError(f"--data: no *.txt in {folders}")
        return passages

    def count_examples(self, data: Path) -> int:
        """Questions of the training set. Raises DamagedData."""
        return sum(len(read_passage(path)[1]) for path in self.files(data, "train"))

    def build(self, data: Path, split: str, vocab: Vocab, lengths: Lengths) -> Features:
        """Tokenise a split, one passage at a time."""
        builder = FeatureBuilder()
        labels = []
        levels = []
        files = self.files(data, split)
        for path in files:
            passage, questions = read_passage(path)
            texts = [passage, *(ending for endings, _ in questions for ending in endings)]
            encoded = vocab.encode(texts)
            ids = encoded[0]
            options = iter(encoded[1:])
            whole = builder.add_text(ids)
            for _, label in questions:
                for option in islice(options, len(OPTIONS)):
                    kept = option[-lengths.question :]
                    room = lengths.sequence - 3 - len(kept)
                    if len(kept) < len(option):
                        builder.count("options cut at the front")
                    if len(ids) > room:
                        builder.count("passages cut at the end")
                    part = (builder.add_text(kept), 0, len(kept))
                    builder.add_row(len(labels), (whole, 0, min(len(ids), room)), part)
                labels.append(label)
                levels.append(LEVELS.index(path.parent.name))
        builder.count("examples", len(labels))
        for number, level in enumerate(LEVELS):
            builder.count(f"of them {level}", levels.count(number))
        known = {*files}
        others = [p for p in (data / split).rglob("[!.]*") if p.is_file() and p not in known]
        if others:
            builder.count(f"files left out, such as {min(others).relative_to(data)}", len(others))
        return builder.build(
            choices=len(OPTIONS), labels=np.array(labels, np.int64), levels=np.array(levels)
        )

    def score(self, split: Split, outputs: dict) -> dict[str, float]:
        """Accuracy over logits [questions, 4]: of all questions, and of each level present."""
        right = outputs["logits"].argmax(1) == split.features.arrays["labels"]
        scores = {"accuracy": float(right.mean())}
        for number, level in enumerate(LEVELS):
            of_level = split.features.arrays["levels"] == number
            if of_level.any():
                scores[f"accuracy_{level}"] = float(right[of_level].mean())
        return scores

    def write(self, split: Split, outputs: dict, folder: Path, metrics: dict) -> None:
        """Write the letter predicted for each question, as "high/1001.txt-0": "C"."""
        letters = iter(outputs["logits"].argmax(1))
        answers = {
            f"{path.parent.name}/{path.name}-{number}": OPTIONS[next(letters)]
            for path in self.files(split.data, split.name)
            for number in range(len(read_passage(path)[1]))
        }
        write_json(folder / f"predictions.{split.name}.json", answers)


def read_passage(path: Path) -> tuple[str, list[tuple[list[str], int]]]:
    """A passage, and of each question on it the four endings (question and option) and the label.

    Raises DamagedData, which names the file.
    """
    content = read_data(path, SCHEMA)
    passage = content["article"]
    columns = [content[name] for name in ("questions", "options", "answers")]
    if len({len(column) for column in columns}) != 1:
        sizes = ", ".join(str(len(column)) for column in columns)
        raise DamagedData(f"{path}: questions, options and answers are {sizes}; must be equal")
    questions = []
    for question, choices, answer in zip(*columns, strict=True):
        blank = question if "_" in question else f"{question} _"
        endings = [blank.replace("_", option) for option in choices]
        questions.append((endings, OPTIONS.index(answer)))
    return passage, questions
