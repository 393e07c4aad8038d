"""Tables with a column of text: CSV, Parquet, and Arrow as `datasets` saves it.

A table never is in memory: CSV is read row by row, the others a few rows at a time. pyarrow, of the
extra [parquet], is imported only if there is something for it to read.
"""

import codecs
import csv
import io
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import IO, Any, NamedTuple

from albert_ds.base.cli import require
from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.storage import open_parts
from albert_ds.text.documents import (
    BROKEN_ROW,
    MAX_LINE_BYTES,
    NO_TEXT_FIELD,
    NUL_BYTES,
    OVERLONG_LINE,
    WRONG_ENCODING,
    Document,
    Line,
    cut_lines,
)

DELIMITERS = (",", "\t", ";", "|")
HEAD_ROWS = 100  # by which a table is told from prose
MIN_ALIKE = 0.9  # of these rows have as many fields as the first
BATCH_ROWS = 128
READ_BYTES = 4 << 20  # of a column at once
MAX_SHOWN = 300  # characters of the names of columns
# Without pre_buffer=False all of a row group is loaded first.
HOW_TO_READ: Any = {
    "buffer_size": READ_BYTES,
    "pre_buffer": False,
    "page_checksum_verification": True,
}
PARQUET_MAGIC = b"PAR1"  # begins a file, and ends it
ARROW_FILE = b"ARROW1"  # begins a file, and ends it
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream


def find_delimiter(head: str, column: str) -> str:
    """What separates the fields of a table whose first row names its columns; "" for no table.

    Text is a table if its first row names `column`, or if its rows have as many fields as the
    first, which looks like names: then the reader says which columns there are.
    """
    found: dict[str, int] = {}
    for delimiter in DELIMITERS:
        try:
            reader = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter)
            rows = list(islice(reader, HEAD_ROWS))
        except csv.Error:
            continue
        if len(rows) < 2:
            continue
        if column in rows[0]:
            return delimiter
        header, *others = rows[:-1] if len(rows) > 2 else rows  # the last may be cut off
        alike = sum(len(row) == len(header) for row in others)
        named = all(0 < len(name) == len(name.strip()) for name in header)
        if named and len(header) > 1 and alike >= MIN_ALIKE * len(others):
            found[delimiter] = len(header)
    return max(found, key=found.__getitem__, default="")


class Row(NamedTuple):
    """A row of a table that is text."""

    line: int  # its first
    fields: list[str]
    damage: str = ""  # of DAMAGE: of a line, a wrong quote, or not as many fields as the first row
    why: str = ""  # a row is broken


def read_rows(lines: Iterable[Line], delimiter: str) -> Iterator[Row]:
    """Every row of a table but the blank ones; the first has the names of the columns.

    Of what an open quote takes along, each line is a broken row: it may have been one.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    number, damage, width = 0, "", 0

    def read_texts() -> Iterator[str]:
        nonlocal number, damage
        for line in lines:
            number, damage = line.number, damage or line.damage
            raw = line.raw.removeprefix(codecs.BOM_UTF8) if number == 1 else line.raw
            # Without a line, the next one would be taken for an overlong one.
            yield from io.StringIO(raw.decode("utf-8", "replace") or "\n", newline="")

    rows = csv.reader(read_texts(), delimiter=delimiter, strict=True)
    while True:
        first, damage, why = number + 1, "", ""
        try:
            row = next(rows, None)
        except csv.Error as error:
            row, damage = [], damage or BROKEN_ROW
            why = f"{error} (quotes open and close a field, and are doubled in it)"
            yield from (Row(line, row, damage, why) for line in range(first, number))
            first = number
        if row is None:
            return
        if not row and not damage:  # a blank line
            continue
        width = width or len(row)
        if not damage and len(row) != width:
            damage, why = BROKEN_ROW, f"{len(row)} fields, the header {width}"
        yield Row(first, row, damage, why)


def split_table(
    lines: Iterable[Line], name: str, text_field: str, delimiter: str
) -> Iterator[Document]:
    """Every row of a table after its first, as a document.

    Raises UserError, naming the file `name` and its columns, if none of these is `text_field`.
    """
    rows = read_rows(lines, delimiter)
    place = find_column(name, next(rows, Row(0, [])).fields, text_field)
    for row in rows:
        yield Document([] if row.damage else cut_lines(row.fields[place]), row.line, row.damage)


def find_column(name: str, columns: list[str], text_field: str) -> int:
    """Where the one column of that name is; UserError that lists all if none or more is."""
    count = columns.count(text_field)
    if count != 1:
        shown = " ".join(", ".join(columns).split())[:MAX_SHOWN]
        has = f"{count} columns" if count else "no column"
        raise UserError(
            f"{name}: has {has} {text_field!r}; it has {shown}; "
            "--text-field names the one that holds the text"
        )
    return columns.index(text_field)


class Group(NamedTuple):
    """A row group of a Parquet file."""

    number: int
    begin: int  # bytes of the column of text in the groups before it, as stored
    end: int
    rows_before: int


def list_groups(location: str, text_field: str) -> list[Group]:
    """The row groups of a Parquet file; UserError for a file without that column of text."""
    with _open_parquet(location, text_field) as file:
        return _list_groups(file.metadata, text_field)


def read_parquet(
    location: str, text_field: str, begin: int, end: int
) -> Iterator[tuple[Document, int]]:
    """The rows of the row groups that begin in [begin, end), and the stored bytes up to each."""
    with _open_parquet(location, text_field) as file:
        for group in _list_groups(file.metadata, text_field):
            if not begin <= group.begin < end:
                continue
            batches = file.iter_batches(
                BATCH_ROWS, row_groups=[group.number], columns=[text_field], use_threads=False
            )
            values = _read_values(batches, 0, f"{location}: row group {group.number}")
            for number, value in enumerate(values, group.rows_before + 1):
                yield _make_document(value, number), group.end


def read_arrow(file: IO[bytes], name: str, text_field: str) -> Iterator[Document]:
    """The rows of an open file that begins with an Arrow stream; others may stand behind it."""
    require("pyarrow", "parquet", name)
    from pyarrow import ipc

    begin, end = (8, ARROW_FILE) if file.read(8)[:6] == ARROW_FILE else (0, ARROW_END)
    with _naming(name):
        size = file.seek(-len(end), os.SEEK_END) + len(end)
        if file.read() != end:  # cut between two batches it would just end there
            raise DamagedData(f"{name}: the Arrow file is cut short")
    file.seek(begin)
    number = 0
    while file.tell() < size:
        with _naming(name):
            stream = ipc.open_stream(file)
        place = _find_text(name, stream.schema, text_field)
        for value in _read_values(stream, place, name):
            number += 1
            yield _make_document(value, number)
        if end == ARROW_FILE:  # its footer is the rest of the file
            at = file.tell()
            file.seek(size - len(end) - 4)
            footer = int.from_bytes(file.read(4), "little")
            file.seek(at)
            if any(file.read(min(READ_BYTES, size - len(end) - 4 - footer - at))):
                raise _refuse_several(name, "Arrow")
            return


def _refuse_several(name: str, kind: str) -> UserError:
    return UserError(f"{name}: is several {kind} files, one behind the other; take them apart")


@contextmanager
def _open_parquet(location: str, text_field: str) -> Generator[Any]:
    require("pyarrow", "parquet", location)
    from pyarrow.parquet import ParquetFile

    with open_parts(location) as raw:
        with _naming(f"{location}: not a whole Parquet file"):
            file = ParquetFile(raw, **HOW_TO_READ)
            if _is_behind_another(raw, file.metadata):
                raise _refuse_several(location, "Parquet")
        _find_text(location, file.schema_arrow, text_field)
        yield file


def _is_behind_another(raw: Any, metadata: Any) -> bool:
    """Whether another Parquet file stands before the one that this metadata, at the end, is of.

    Then there is more between the pages and the metadata than indexes, by as much as the other
    file holds, and it ends within as many bytes from the start.
    """
    pages = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            begin = column.dictionary_page_offset or column.data_page_offset
            pages = max(pages, begin + column.total_compressed_size)
    size, tail = raw.seek(0, os.SEEK_END), b""
    left = size - 8 - metadata.serialized_size - pages + len(PARQUET_MAGIC)
    raw.seek(0)
    while left > 0 and (block := raw.read(min(left, READ_BYTES))):
        if 2 * PARQUET_MAGIC in tail + block:
            return True
        left, tail = left - len(block), block[-2 * len(PARQUET_MAGIC) :]
    return False


def _find_text(name: str, schema: Any, text_field: str) -> int:
    """Where the column is; UserError if it is not there or holds no text."""
    from pyarrow import types

    place = find_column(name, schema.names, text_field)
    kind = schema.types[place]
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise UserError(f"{name}: column {text_field!r} holds {kind}, not text")
    return place


def _list_groups(metadata: Any, text_field: str) -> list[Group]:
    groups, begin, rows = [], 0, 0
    for number in range(metadata.num_row_groups):
        about = metadata.row_group(number)
        columns = map(about.column, range(about.num_columns))
        size = sum(c.total_compressed_size for c in columns if c.path_in_schema == text_field)
        size = max(1, size)
        groups.append(Group(number, begin, begin + size, rows))
        begin, rows = begin + size, rows + about.num_rows
    return groups


def _read_values(batches: Iterable[Any], place: int, name: str) -> Iterator[bytes | None]:
    from pyarrow import binary, large_binary, large_string, string

    as_bytes = {string(): binary(), large_string(): large_binary()}
    with _naming(name):
        for batch in batches:
            column = batch.column(place)
            column = column.view(as_bytes.get(column.type, column.type))
            column.validate(full=True)  # wrong offsets would end this process
            for begin in range(0, len(column), BATCH_ROWS):  # a batch of Arrow may be the file
                yield from column.slice(begin, BATCH_ROWS).cast(large_binary()).to_pylist()


@contextmanager
def _naming(name: str) -> Generator[None]:
    """Errors of pyarrow as DamagedData that names what was read."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        why = " ".join(str(error).split())[:MAX_SHOWN] or "not enough memory"
        raise DamagedData(f"{name}: cannot be read: {why}") from None


def _make_document(value: bytes | None, number: int) -> Document:
    """The document of the row of that number."""
    if value is None:
        return Document([], number, NO_TEXT_FIELD)
    if len(value) > MAX_LINE_BYTES:
        return Document([], number, OVERLONG_LINE)
    if b"\0" in value:
        return Document([], number, NUL_BYTES)
    try:
        return Document(cut_lines(value.decode()), number)
    except UnicodeDecodeError:
        return Document([], number, WRONG_ENCODING)
