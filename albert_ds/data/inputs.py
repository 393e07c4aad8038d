"""The text to read, cut into units of work that any process can do by itself.

A unit is some whole files, or a slice of a large plain one, from the begin of a document to the
begin of another. Packed files and those behind a URL are not cut.
"""

import io
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

from albert_ds.data.readers import (
    MAX_LINE_BYTES,
    Document,
    Line,
    begins_document,
    find_kind,
    read_lines,
    split_documents,
)
from albert_ds.data.storage import is_url, look_up, open_file
from albert_ds.data.unpack import READ_ERRORS, is_packed, open_streams
from albert_ds.errors import DamagedData, UserError

UNIT_BYTES = 16 << 20  # as stored
_BUFFER_BYTES = 1 << 20


class Slice(NamedTuple):
    """A file, or a part of one; equal slices hold the same text."""

    location: str
    begin: int
    end: int  # one past the last byte
    modified: str  # when the file was, as its storage tells
    kind: str = ""  # what a file that was cut holds, as its first line tells

    @property
    def size(self) -> int:
        return self.end - self.begin


class Reading(NamedTuple):
    """A document, and how it was come by."""

    document: Document
    name: str  # of the file, and of the member in it
    bytes_read: int  # of all the slices so far, as stored


def cut_units(locations: Iterable[str]) -> list[list[Slice]]:
    """All the text as units of about UNIT_BYTES as stored, in the order of the files."""
    units: list[list[Slice]] = []
    room = 0
    for piece in (piece for location in locations for piece in _cut_file(location)):
        if not units or piece.size > room:
            units.append([])
            room = UNIT_BYTES
        units[-1].append(piece)
        room -= piece.size
    return units


def read_documents(slices: Iterable[Slice], text_field: str = "text") -> Iterator[Reading]:
    """Every document of the slices, in order, empty and damaged ones included.

    Raises UserError for a file that cannot be opened, DamagedData naming file and line for one
    that cannot be read through.
    """
    done = 0
    for piece in slices:
        try:
            raw = open_file(piece.location)
        except OSError as error:
            raise UserError(f"{piece.location}: cannot be opened: {error.strerror}") from None
        with raw:
            raw.seek(piece.begin)
            window = raw
            if not is_packed(piece.location) and not is_url(piece.location):
                window = io.BufferedReader(_Window(raw, piece.end), _BUFFER_BYTES)
            for name, file in open_streams(piece.location, window):
                for document in _read_stream(name, file, piece, text_field):
                    yield Reading(document, name, done + min(raw.tell() - piece.begin, piece.size))
        done += piece.size


def _read_stream(name: str, file, piece: Slice, text_field: str) -> Iterator[Document]:
    number = 0

    def lines() -> Iterator[Line]:
        nonlocal number
        for line in read_lines(file, is_start=not piece.begin):
            number = line.number
            yield line

    try:
        yield from split_documents(lines(), text_field, piece.kind)
    except READ_ERRORS as error:
        raise DamagedData(f"{name}: cannot be read after line {number}: {error}") from None


class _Window(io.RawIOBase):
    """The bytes of an open file from where it stands up to `end`."""

    def __init__(self, file: IO[bytes], end: int):
        self._file = file
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        content = self._file.read(min(len(buffer), self._end - self._file.tell()))
        buffer[: len(content)] = content
        return len(content)


def _cut_file(location: str) -> Iterator[Slice]:
    try:
        size, modified = look_up(location)
    except OSError as error:
        raise UserError(f"{location}: cannot be opened: {error.strerror}") from None
    begin, kind = 0, ""
    if size > UNIT_BYTES and not is_url(location) and not is_packed(location):
        with open(location, "rb") as file:
            kind = _find_kind(file)
            while size - begin > UNIT_BYTES:
                end = _find_document(file, kind, begin + UNIT_BYTES, size)
                yield Slice(location, begin, end, modified, kind)
                begin = end
    if begin < size or not begin:
        yield Slice(location, begin, size, modified, kind)


def _find_kind(file: IO[bytes]) -> str:
    for line in read_lines(file):
        if line.text or line.damage:
            return find_kind(line.text)
    return "text"


def _find_document(file: IO[bytes], kind: str, offset: int, size: int) -> int:
    """Where the first document that opens after `offset` begins; `size` where none does."""
    file.seek(offset)
    file.readline()  # the rest of a line whose begin was not seen
    at, after_blank = file.tell(), False
    while raw := file.readline(MAX_LINE_BYTES):
        text = raw.decode("utf-8", "replace").strip()
        if begins_document(text, kind, after_blank=after_blank):
            return at
        at, after_blank = file.tell(), not text
    return size
