"""Tab-separated files as GLUE ships them: byte-order marks, bare double quotes, 0 or 1 headers.

No field is quoted, so a line is split at its tabs only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from albert_ds.errors import DamagedData, UserError


@dataclass(kw_only=True, slots=True)
class Table:
    """The rows of a file as (line number, {column: field}); keeps the numbers of skipped lines.

    Raises UserError if the file cannot be read, DamagedData, with the line, if a row or the
    header is wrong.
    """

    path: Path
    columns: list[str]  # those the reader needs; without a header: all columns, in order
    has_header: bool = True
    tolerance: float = 0.0  # share of the rows that may be malformed; they are skipped
    malformed: list[int] = field(default_factory=list)  # line numbers of the skipped rows

    def __iter__(self) -> Iterator[tuple[int, dict[str, str]]]:
        names, total = self.columns, 0
        try:
            # Not utf-8-sig: some files have a mark in the middle of the table, which is text.
            with self.path.open(encoding="utf-8", newline="\n") as file:
                for number, line in enumerate(file, start=1):
                    line = line.rstrip("\r\n")
                    fields = (line.removeprefix("\ufeff") if number == 1 else line).split("\t")
                    if number == 1 and self.has_header:
                        names = fields
                        if missing := [name for name in self.columns if name not in names]:
                            raise DamagedData(
                                f"{self.path}, line 1: the header has no column {missing[0]!r}; it "
                                f"has {', '.join(names)[:200]}"
                            )
                        continue
                    total += 1
                    if len(fields) == len(names):
                        yield number, dict(zip(names, fields, strict=True))
                    elif self.tolerance:
                        self.malformed.append(number)
                    else:
                        raise DamagedData(
                            f"{self.path}, line {number}: {len(fields)} fields, must be "
                            f"{len(names)}"
                        )
        except FileNotFoundError:
            raise UserError(f"--data: {self.path}: no such file") from None
        except OSError as error:
            raise UserError(f"--data: {self.path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise DamagedData(f"{self.path}: not UTF-8: {error.reason}") from None
        if not total:
            raise DamagedData(f"{self.path}: holds no examples")
        if len(self.malformed) > max(1, self.tolerance * total):
            raise DamagedData(
                f"{self.path}: {len(self.malformed)} of {total} rows have a wrong number of "
                f"fields, the first in line {self.malformed[0]}"
            )
