"""Files with labels of the user's own: of each split one CSV, TSV, JSON lines or CoNLL file.

What is wrong in them is the user's error (code 2), with file and line.
"""

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from albert_ds.cli import log_line
from albert_ds.errors import UserError
from albert_ds.files import write_json
from albert_ds.json_files import check, parse_json

T = TypeVar("T")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
MAX_FIELD = 1 << 24  # characters of one field of a table
DRAWS = 1000  # of the examples, for an interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """Words, and a tag for each; a test set may have none."""

    where: list[str]  # of each word, for messages
    words: list[str]
    tags: list[str] | None


def find_files(data: Path, split: str, endings: tuple[str, ...]) -> list[Path]:
    """The one file of a split, as a list. Raises UserError if there is none, or more than one."""
    names = [f"{split}{ending}" for ending in endings]
    found = [data / name for name in names if (data / name).is_file()]
    if len(found) != 1:
        has = " and ".join(path.name for path in found) or "none"
        raise UserError(f"--data {data}: must hold one of {', '.join(names)}; it has {has}")
    return found


def read_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """(file and line, {column: value}) of each example of a table or of JSON lines."""
    with _Lines(path) as lines:
        if path.suffix == ".jsonl":
            for text in lines:
                if text.strip():
                    yield lines.where, parse_json(text.encode(), lines.where)
            return
        names: list[str] = []
        for fields in csv.reader(lines, delimiter=DELIMITERS[path.suffix], strict=True):
            if not names:
                names = fields
                if len({*names}) < len(names):
                    raise UserError(f"{lines.where}: a column of the header stands there twice")
            elif len(fields) not in (0, len(names)):  # 0: a blank line
                raise UserError(f"{lines.where}: {len(fields)} fields, the header {len(names)}")
            elif fields:
                yield lines.where, dict(zip(names, fields, strict=True))


def need_one(path: Path, found: Iterator[T]) -> Iterator[T]:
    """The same, of which there must be at least one."""
    first = next(found, None)
    if first is None:
        raise UserError(f"{path}: holds no examples")
    return chain([first], found)


def read_text(where: str, row: dict, column: str) -> str:
    """The text in a column of a row."""
    if column not in row:
        raise UserError(f"{where}: no column {column!r}; there are {', '.join(row)[:200]}")
    check(row[column], str, f"{where}: {column}")
    return row[column]


def read_sentences(path: Path) -> Iterator[Sentence]:
    """The sentences of a CoNLL file, or of JSON lines with `words` and `tags`.

    CoNLL: a line for each word, its first column, and its tag, the last one; columns are apart by
    blanks or tabs, sentences by blank lines; -DOCSTART- lines are left out.
    """
    if path.suffix == ".jsonl":
        for where, row in read_rows(path):
            tags = row.get("tags")
            check(row, {"words": [str]} | ({} if tags is None else {"tags": [str]}), where)
            if tags is not None and len(tags) != len(row["words"]):
                raise UserError(f"{where}: {len(row['words'])} words, but {len(tags)} tags")
            for word in row["words"] or [""]:
                if not word or re.search(r"\s", word):
                    raise UserError(f"{where}: words: {word!r}: must be a word without blanks")
            places = [f"{where}: word {n}" for n in range(1, len(row["words"]) + 1)]
            yield Sentence(where=places, words=row["words"], tags=tags)
        return
    rows, width = [], 0

    def close() -> Sentence:
        places, words, tags = (list(column) for column in zip(*rows, strict=True))
        rows.clear()
        return Sentence(where=places, words=words, tags=tags if width > 1 else None)

    with _Lines(path) as lines:
        for text in lines:
            fields = re.split(r"[ \t]+", text.strip())
            if fields[0] in ("", "-DOCSTART-"):
                if rows:
                    yield close()
                continue
            width = width or len(fields)
            if len(fields) != width:
                raise UserError(f"{lines.where}: {len(fields)} columns, the first word {width}")
            rows.append((lines.where, fields[0], fields[-1]))
        if rows:
            yield close()


class _Lines:
    """The lines of a file, and where the last one is; errors of reading become UserError."""

    def __init__(self, path: Path):
        self.path, self.number = path, 0

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.number}"

    def __enter__(self):
        csv.field_size_limit(MAX_FIELD)
        try:
            self.file = self.path.open(encoding="utf-8-sig", newline="")
        except OSError as error:
            raise UserError(f"--data: {self.path}: {error.strerror}") from None
        return self

    def __iter__(self) -> Iterator[str]:
        for line in self.file:
            self.number += 1
            yield line
        if self.number == 0:
            raise UserError(f"{self.path}: is empty")

    def __exit__(self, kind, error, traceback):
        self.file.close()
        if isinstance(error, UnicodeDecodeError):
            raise UserError(f"{self.path}, after line {self.number}: not UTF-8: {error.reason}")
        if isinstance(error, csv.Error):
            raise UserError(
                f"{self.where}: {error} (quotes open and close a field, and are doubled in it)"
            )


def write_scores(
    path: Path, count: int, measure: Callable[[np.ndarray], dict[str, float]], **parts: dict
) -> None:
    """Write scores of `count` examples with 95 % intervals, and what else there is; say them.

    measure: the scores of some of the examples, by their numbers. The interval is that of draws
    of as many examples, with replacement (the percentile bootstrap).
    """
    rng = np.random.default_rng(0)
    drawn = [measure(rng.integers(count, size=count)) for _ in range(DRAWS)]
    scores, words = {}, []
    for name, value in measure(np.arange(count)).items():
        low, high = np.percentile([found[name] for found in drawn], [2.5, 97.5]).tolist()
        scores[name] = {"value": value, "low": low, "high": high}
        words.append(f"{name} {value:.4f} ({low:.4f} to {high:.4f})")
    write_json(path, {"examples": count, "scores": scores, **parts})
    log_line(f"{path}: {count:,} examples, with 95 % intervals: {', '.join(words)}")
