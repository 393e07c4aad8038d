"""Files with labels of the user's own: of each split one CSV, TSV, JSON lines or CoNLL file.

What is wrong in them is the user's error (code 2), with file and line.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import TypeVar

import numpy as np

from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError
from albert_ds.base.files import write_json
from albert_ds.base.json_files import check, parse_json
from albert_ds.text.documents import (
    MAX_LINE_BYTES,
    NUL_BYTES,
    OVERLONG_LINE,
    WRONG_ENCODING,
    Line,
    explain_damage,
    read_lines,
)
from albert_ds.text.tables import read_rows

T = TypeVar("T")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
DAMAGED_LINES = {
    WRONG_ENCODING: "not UTF-8",
    NUL_BYTES: "has a NUL byte",
    OVERLONG_LINE: f"has more than {MAX_LINE_BYTES >> 20} MB",
}
DRAWS = 1000  # of the examples, for an interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """Words, and a tag for each; a test set may have none."""

    where: list[str]  # of each word, for messages
    words: list[str]
    tags: list[str] | None


def find_file(data: Path, split: str, endings: tuple[str, ...]) -> Path:
    """The one file of a split. Raises UserError if there is none, or more than one."""
    names = [f"{split}{ending}" for ending in endings]
    files = [data / name for name in names if (data / name).is_file()]
    if len(files) != 1:
        has = " and ".join(path.name for path in files) or "none"
        raise UserError(f"--data {data}: must hold one of {', '.join(names)}; it has {has}")
    return files[0]


def read_examples(path: Path) -> Iterator[tuple[str, dict]]:
    """(file and line, {column: value}) of each example of a table or of JSON lines."""
    lines = _read_lines(path)
    if path.suffix == ".jsonl":
        for line in lines:
            if line.text:
                where = f"{path}, line {line.number}"
                yield where, parse_json(line.text.encode(), where)
        return
    names: list[str] = []
    for row in read_rows(lines, DELIMITERS[path.suffix]):
        where = f"{path}, line {row.line}"
        if row.damage:
            raise UserError(f"{where}: {row.why}")
        if names:
            yield where, dict(zip(names, row.fields, strict=True))
        elif len({*row.fields}) < len(row.fields):
            raise UserError(f"{where}: a column of the header stands there twice")
        names = names or row.fields


def need_one(path: Path, examples: Iterator[T]) -> Iterator[T]:
    """The same, of which there must be at least one."""
    first = next(examples, None)
    if first is None:
        raise UserError(f"{path}: holds no examples")
    return chain([first], examples)


def read_text(where: str, row: dict, column: str) -> str:
    """The text in a column of a row."""
    if column not in row:
        raise UserError(f"{where}: no column {column!r}; there are {str([*row])[1:-1][:200]}")
    check(row[column], str, f"{where}: {column}")
    return row[column]


def read_sentences(path: Path) -> Iterator[Sentence]:
    """The sentences of a CoNLL file, or of JSON lines with `words` and `tags`.

    CoNLL: a line for each word, its first column, and its tag, the last one; columns are apart by
    blanks or tabs, sentences by blank lines; -DOCSTART- lines are left out.
    """
    if path.suffix == ".jsonl":
        for where, row in read_examples(path):
            tags = row.get("tags")
            check(row, {"words": [str]} | ({} if tags is None else {"tags": [str]}), where)
            if tags is not None and len(tags) != len(row["words"]):
                raise UserError(f"{where}: {len(row['words'])} words, but {len(tags)} tags")
            for word in row["words"] or [""]:
                if not word or re.search(r"[ \t\r\n]", word):
                    raise UserError(f"{where}: words: {word!r}: must be a word without blanks")
            places = [f"{where}: word {n}" for n in range(1, len(row["words"]) + 1)]
            yield Sentence(where=places, words=row["words"], tags=tags)
        return
    width = 0
    rows = groupby(_read_columns(path), lambda row: row[1][0] in ("", "-DOCSTART-"))
    for is_between, group in rows:
        if is_between:
            continue
        kept = []
        for number, fields in group:
            where = f"{path}, line {number}"
            width = width or len(fields)
            if len(fields) != width:
                raise UserError(f"{where}: {len(fields)} columns, the first word {width}")
            kept.append((where, fields[0], fields[-1]))
        places, words, tags = map(list, zip(*kept, strict=True))
        yield Sentence(where=places, words=words, tags=tags if width > 1 else None)


def _read_columns(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and columns of each line of a CoNLL file; a no-break space may be a word."""
    for line in _read_lines(path):
        text = line.raw.decode("utf-8-sig").strip(" \t\r\n")
        if "\r" in text:
            raise UserError(f"{path}: its lines end in CR alone: convert it with tr '\\r' '\\n'")
        yield line.number, re.split(r"[ \t]+", text)


def _read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, none of which may be damaged."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"--data: {path}: {error.strerror}") from None
    with file:
        for line in read_lines(file):
            if line.damage:
                cause = explain_damage(line.damage, line.raw)
                raise UserError(f"{path}, line {line.number}: {DAMAGED_LINES[line.damage]}{cause}")
            yield line


def write_scores(
    path: Path, count: int, measure: Callable[[np.ndarray], dict[str, float]], **parts: dict
) -> None:
    """Write scores of `count` examples with 95 % intervals, and what else there is; say them.

    measure: the scores of some of the examples, by their numbers. The interval is that of draws
    of as many examples, with replacement (the percentile bootstrap).
    """
    rng = np.random.default_rng(0)
    drawn = [measure(rng.integers(count, size=count)) for _ in range(DRAWS)]
    scores = {}
    words = []
    for name, value in measure(np.arange(count)).items():
        low, high = np.percentile([draw[name] for draw in drawn], [2.5, 97.5]).tolist()
        scores[name] = {"value": value, "low": low, "high": high}
        words.append(f"{name} {value:.4f} ({low:.4f} to {high:.4f})")
    write_json(path, {"examples": count, "scores": scores, **parts})
    log_line(f"{path.name}: {count:,} examples, with 95 % intervals: {', '.join(words)}")
