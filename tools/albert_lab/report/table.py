"""A table of the report: on its page, and as CSV."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ABSENT = "\u2013"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_csv(table: Table, path: Path) -> None:
    """Write a table; what is absent is empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        write = csv.writer(file).writerow
        write(table.header)
        for row in table.rows:
            write("" if cell == ABSENT else cell for cell in row)
