"""The tasks by the names that --task takes, and their common interface."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, runtime_checkable

from albert_ds.base.errors import UserError
from albert_ds.base.plugin import Table
from albert_ds.tasks.features import Features, Split, fingerprint
from albert_ds.tasks.glue import GLUE
from albert_ds.tasks.race import RaceTask
from albert_ds.tasks.recipes import RECIPES, Lengths
from albert_ds.tasks.squad.task import SQUAD
from albert_ds.tasks.text import TextTask
from albert_ds.tasks.tokens import TokensTask
from albert_ds.vocab.vocab import Vocab


@runtime_checkable
class Task(Protocol):
    """The interface of a task."""

    @property
    def head(self) -> str: ...  # of HEADS in model/task_heads.py

    @property
    def labels(self) -> tuple[str, ...]: ...  # names of the classes; empty for scores and spans

    @property
    def metrics(self) -> tuple[str, ...]: ...  # the first decides which evaluation is best

    @property
    def published(self) -> dict[str, int]: ...  # examples of each split

    @property
    def dev_splits(self) -> tuple[str, ...]: ...

    @property
    def test_splits(self) -> tuple[str, ...]: ...  # evaluated if their files exist

    @property
    def has_test_labels(self) -> bool: ...  # True: the test sets are scored too

    def files(self, data: Path, split: str) -> list[Path]: ...

    def count_examples(self, data: Path) -> int: ...  # of the training set

    def build(self, data: Path, split: str, vocab: Vocab, lengths: Lengths) -> Features: ...

    def score(self, split: Split, outputs: dict) -> dict[str, float]: ...

    def write(self, split: Split, outputs: dict, folder: Path, metrics: dict) -> None: ...


TASKS = Table(Task) | {
    **{f"glue/{name}": task for name, task in GLUE.items()},
    **SQUAD,
    "race": RaceTask(),
}
USER_TASKS = {"text": TextTask, "tokens": TokensTask}  # their labels are those of the data
assert TASKS.keys() | USER_TASKS.keys() == RECIPES.keys()


def find_task(name: str, labels: tuple[str, ...]) -> Task:
    """The task of a run whose head has these labels."""
    return USER_TASKS[name](labels=labels) if name in USER_TASKS else TASKS[name]


def open_task(name: str, data: Path) -> Task:
    """The task that a folder holds. Raises UserError if its labels are wrong."""
    return USER_TASKS[name].open(data) if name in USER_TASKS else TASKS[name]


def fingerprint_splits(
    name: str, task: Task, data: Path, vocab: Vocab, lengths: Lengths
) -> dict[str, str]:
    """Hashes that identify the tokenised splits: their content, labels, vocabulary and lengths.

    The splits are train, the dev sets, and the test sets whose files exist. Raises UserError.
    """
    files = {split: task.files(data, split) for split in ("train", *task.dev_splits)}
    for split in task.test_splits:
        with suppress(UserError):  # the folder has no files of this split
            members = task.files(data, split)
            if all(path.is_file() for path in members):
                files[split] = members
    return {
        split: fingerprint(
            data,
            paths,
            task=name,
            split=split,
            labels=task.labels,
            vocab=vocab.sha256,
            normalisation=asdict(vocab.normalisation),
            lengths=[lengths.sequence, lengths.question, lengths.stride],
        )
        for split, paths in files.items()
    }
