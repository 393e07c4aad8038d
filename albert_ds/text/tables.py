"""Tables with a column of text: CSV, Parquet, and Arrow as `datasets` saves it.

A table never is in memory: CSV is read row by row, the others a few rows at a time. pyarrow, of the
extra [parquet], is imported only if there is something for it to read.
"""

import codecs
import csv
import io
import os
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice, product
from typing import Any, NamedTuple

from albert_ds.base.cli import require
from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.storage import open_parts
from albert_ds.text.documents import (
    BROKEN_ROW,
    HEAD_BYTES,
    MAX_LINE_BYTES,
    NO_TEXT_FIELD,
    NUL_BYTES,
    OVERLONG_LINE,
    WRONG_ENCODING,
    Document,
    Line,
    Stream,
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


class Dialect(NamedTuple):
    """How the fields of a table are separated."""

    delimiter: str
    skips_blanks: bool = False  # before a field, as those of the names of the columns
    is_named: bool = False  # by Excel's line `sep=;` before the names


def find_dialect(head: bytes, column: str) -> Dialect | None:
    """The dialect of a table whose first row names its columns; None for no table.

    Text is a table if its first row names `column`, or if its rows have as many fields as the
    first, which looks like names: then the reader says which columns there are.
    """
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace").lstrip("\r\n ")
    if named := re.match(r"sep=(.)[\r\n]", text):
        return Dialect(named[1], is_named=True)
    columns: dict[str, int] = {}
    for delimiter, skips_blanks in product(DELIMITERS, (False, True)):
        options: Any = {"delimiter": delimiter, "skipinitialspace": skips_blanks}
        try:
            rows = list(islice(csv.reader(io.StringIO(text, newline=""), **options), HEAD_ROWS))
        except csv.Error:
            continue
        if not rows:
            return None
        header, *others = rows if len(rows) < 3 else rows[:-1]  # the last may be cut off
        if not skips_blanks and column in header and (others or len(header) > 1):
            return Dialect(delimiter)
        alike = sum(len(row) == len(header) for row in others)
        if len(header) < 2 or alike < MIN_ALIKE * len(others):
            continue
        names = list(map(str.strip, header))
        # A sentence may have such commas too, but rarely several, nor words without blanks.
        is_header = len(others) > 2 or all(re.fullmatch(r"\S+", name) for name in names)
        if skips_blanks and column in names and is_header:
            return Dialect(delimiter, skips_blanks)
        if not skips_blanks and others and all(names) and names == header:
            columns[delimiter] = len(header)
    return Dialect(max(columns, key=columns.__getitem__)) if columns else None


class Row(NamedTuple):
    """A row of a table that is text."""

    line: int  # its first
    fields: list[str]
    damage: str = ""  # of DAMAGE: of a line, a wrong quote, or not as many fields as the first row
    why: str = ""  # a row is broken


def read_rows(lines: Iterable[Line], delimiter: str, *, skips_blanks=False) -> Iterator[Row]:
    """Every row of a table but the blank ones; the first has the names of the columns.

    Of what an open quote takes along, each line is a broken row: it may have been one.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    number = 0
    damage = ""
    width = 0

    def read_texts() -> Iterator[str]:
        nonlocal number, damage
        for line in lines:
            number = line.number
            damage = damage or line.damage
            raw = line.raw.removeprefix(codecs.BOM_UTF8) if number == 1 else line.raw
            # Without a line, the next one would be taken for an overlong one.
            yield from io.StringIO(raw.decode("utf-8", "replace") or "\n", newline="")

    options: Any = {"delimiter": delimiter, "skipinitialspace": skips_blanks}
    rows = csv.reader(read_texts(), strict=True, **options)
    while True:
        first = number + 1
        damage = ""
        why = ""
        try:
            row = next(rows, None)
        except csv.Error as error:
            row = []
            damage = damage or BROKEN_ROW
            why = f"{error} (quotes open and close a field, and are doubled in it)"
            yield from (Row(line, row, damage, why) for line in range(first, number))
            first = number
        if row is None:
            return
        if not row and not damage:  # a blank line
            continue
        width = width or len(row)
        if not damage and len(row) != width:
            damage = BROKEN_ROW
            why = f"{len(row)} fields, the header {width}"
        yield Row(first, row, damage, why)


def read_csv(stream: Stream) -> Iterator[Document]:
    """Every row of a table after its first, as a document.

    Raises UserError, naming the file and its columns, if none or more is the one of the text.
    """
    dialect = find_dialect(stream.file.peek(HEAD_BYTES)[:HEAD_BYTES], stream.text_field)
    assert dialect is not None  # by the same bytes
    lines = stream.read_lines()
    if dialect.is_named:
        next(line for line in lines if line.text)
    rows = read_rows(lines, dialect.delimiter, skips_blanks=dialect.skips_blanks)
    names = list(map(str.strip, next(rows, Row(0, [])).fields))
    place = find_column(stream.name, names, stream.text_field)
    stream.other_columns = [name for name in names if name != stream.text_field]
    for row in rows:
        fields = [field.removeprefix("\ufeff").strip() for field in row.fields]
        if fields == names:
            stream.left_out["headers behind the first"] += 1
        elif sorted(fields) == sorted(names):
            raise UserError(
                f"{stream.name}: line {row.line} has the names of the columns in another order: "
                "it is several tables, one behind the other; take them apart"
            )
        else:
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


def cut_parquet(location: str, text_field: str) -> Iterator[int]:
    """Where a Parquet file may be cut; UserError for a file without that column of text."""
    with open_parts(location) as raw:
        file = _open_parquet(raw, location, text_field)
        yield from (group.end for group in _list_groups(file.metadata, text_field))


def read_parquet(stream: Stream) -> Iterator[Document]:
    """The rows of the row groups that begin in the slice."""
    file = _open_parquet(stream.file, stream.name, stream.text_field)
    columns = file.schema_arrow.names
    stream.other_columns = [name for name in columns if name != stream.text_field]
    for group in _list_groups(file.metadata, stream.text_field):
        if not stream.begin <= group.begin < stream.end:
            continue
        batches = file.iter_batches(
            BATCH_ROWS, row_groups=[group.number], columns=[stream.text_field], use_threads=False
        )
        values = _read_values(batches, 0, f"{stream.name}: row group {group.number}")
        stream.line = group.rows_before
        for value in values:
            stream.line += 1
            yield _make_document(stream, value)
        stream.done = group.end - stream.begin


def read_arrow(stream: Stream) -> Iterator[Document]:
    """The rows of a file that begins with an Arrow stream; others may stand behind it."""
    name = stream.name
    file = stream.file
    require("pyarrow", "parquet", name)
    from pyarrow import ipc

    begin, end = (8, ARROW_FILE) if file.read(8)[:6] == ARROW_FILE else (0, ARROW_END)
    with _naming(name):
        size = file.seek(-len(end), os.SEEK_END) + len(end)
        if file.read() != end:  # cut between two batches it would just end there
            raise DamagedData(f"{name}: the Arrow file is cut short")
    file.seek(begin)
    while file.tell() < size:
        with _naming(name):
            batches = ipc.open_stream(file)
        place = _find_text(name, batches.schema, stream.text_field)
        columns = batches.schema.names
        stream.other_columns = [name for name in columns if name != stream.text_field]
        for value in _read_values(batches, place, name):
            stream.line += 1
            yield _make_document(stream, value)
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


def _open_parquet(raw: Any, name: str, text_field: str) -> Any:
    require("pyarrow", "parquet", name)
    from pyarrow.parquet import ParquetFile

    with _naming(f"{name}: not a whole Parquet file"):
        file = ParquetFile(raw, **HOW_TO_READ)
        if _is_behind_another(raw, file.metadata):
            raise _refuse_several(name, "Parquet")
    _find_text(name, file.schema_arrow, text_field)
    return file


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
    size = raw.seek(0, os.SEEK_END)
    tail = b""
    left = size - 8 - metadata.serialized_size - pages + len(PARQUET_MAGIC)
    raw.seek(0)
    while left > 0 and (block := raw.read(min(left, READ_BYTES))):
        if 2 * PARQUET_MAGIC in tail + block:
            return True
        left = left - len(block)
        tail = block[-2 * len(PARQUET_MAGIC) :]
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
    groups = []
    begin = 0
    rows = 0
    for number in range(metadata.num_row_groups):
        about = metadata.row_group(number)
        columns = map(about.column, range(about.num_columns))
        size = sum(c.total_compressed_size for c in columns if c.path_in_schema == text_field)
        size = max(1, size)
        groups.append(Group(number, begin, begin + size, rows))
        begin += size
        rows += about.num_rows
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


def _make_document(stream: Stream, value: bytes | None) -> Document:
    """The document of the row that was read last."""
    number = stream.line
    if value is None:
        return Document([], number, NO_TEXT_FIELD)
    stream.size += len(value)
    if len(value) > MAX_LINE_BYTES:
        return Document([], number, OVERLONG_LINE)
    if b"\0" in value:
        return Document([], number, NUL_BYTES)
    try:
        return Document(cut_lines(value.decode()), number)
    except UnicodeDecodeError:
        return Document([], number, WRONG_ENCODING)
