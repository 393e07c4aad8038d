"""The text to read, cut into units of work that any process can do alone.

A unit is a list of whole files, or one slice of a large one, cut as its kind may be; packed files,
and lines behind a URL, are not cut. Files are unpacked as their names end:

    a.txt    a.txt.gz .bz2 .xz .zst    a.tar    a.tar.gz ...    a tar's members likewise

A member of a tar is only read. Its name and its links cannot reach another file.
"""

import bz2
import gzip
import io
import lzma
import math
import os
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import IO, Any, NamedTuple

from albert_ds.base.errors import DamagedData, UserError, hide_passwords
from albert_ds.base.storage import FileInfo, is_url, open_file, read_bytes, split_query, stat
from albert_ds.text.documents import (
    DAMAGE,
    HEAD_BYTES,
    MAX_LINE_BYTES,
    Document,
    Stream,
    explain_damage,
)
from albert_ds.text.kinds import KINDS, Kind, find_kind

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

UNIT_BYTES = 16 << 20  # as stored
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError, tarfile.TarError)
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz"}
_BUFFER_BYTES = 1 << 20


class _Unpacked(io.RawIOBase):
    """What all packed streams of a file hold; bz2.open and lzma.open end at a damaged later one."""

    def __init__(self, file: IO[bytes], begin: Callable[[], Any]):
        self._read = partial(file.read, _BUFFER_BYTES)
        self._begin = begin
        self._stream = begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        content = packed = b""
        while not content:
            if self._stream.eof:
                packed = self._stream.unused_data.lstrip(b"\0") or self._read().lstrip(b"\0")
                if not packed:
                    return 0
                self._stream = self._begin()
            elif self._stream.needs_input and not (packed := self._read()):
                raise EOFError("it is cut short")
            content = self._stream.decompress(packed, len(buffer))
            packed = b""
        buffer[: len(content)] = content
        return len(content)


UNPACKERS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": partial(_Unpacked, begin=bz2.BZ2Decompressor),
    ".xz": partial(_Unpacked, begin=lzma.LZMADecompressor),
    ".zst": partial(_Unpacked, begin=zstd.ZstdDecompressor),
}


class Slice(NamedTuple):
    """A file, or a part of one; equal slices hold the same text."""

    location: str
    begin: int  # in bytes, or as its kind counts them
    end: int  # one past the last byte
    file: FileInfo
    kind: str = ""  # the name of the kind of an unpacked file

    @property
    def size(self) -> int:
        return self.end - self.begin


class Reading(NamedTuple):
    """A document and where it was read."""

    document: Document
    name: str  # of the file, and of the member in it
    bytes_read: int  # of all the slices so far, as stored
    head: bytearray  # the first HEAD_BYTES of the file or member, as far as they are read
    part: str = "line"  # what the number of a document counts

    @property
    def place(self) -> str:
        return f"{self.name}: {self.part} {self.document.line}"

    @property
    def cause(self) -> str:
        """What the head tells of the cause of the damage, as the end of a message."""
        return explain_damage(self.document.damage, bytes(self.head))


def cut_units(locations: Iterable[str], text_field: str = "text") -> list[list[Slice]]:
    """All the text as units of about UNIT_BYTES as stored, in the order of the files."""
    units: list[list[Slice]] = []
    room = 0
    for piece in (piece for location in locations for piece in _cut_file(location, text_field)):
        if not units or piece.size > room:
            units.append([])
            room = UNIT_BYTES
        units[-1].append(piece)
        room -= piece.size
    return units


def list_files(units: Iterable[Iterable[Slice]]) -> list[dict]:
    """The files of all units for index.json: what they are called, in UTF-8, and their sizes."""
    files = {piece.location: piece.file.size for unit in units for piece in unit}
    named = ((hide_passwords(n) if is_url(n) else os.path.basename(n), files[n]) for n in files)
    return [{"name": n.encode(errors="replace").decode(), "bytes": size} for n, size in named]


def read_documents(
    slices: Iterable[Slice], text_field: str = "text", tally: Counter[str] | None = None
) -> Iterator[Reading]:
    """Every document of the slices, in order, empty and damaged ones included.

    `tally` counts what was read, for `describe_tally`. Raises UserError for a file that cannot be
    opened, DamagedData naming file and line for one that cannot be read through, and for one that
    has changed since it was cut.
    """
    done = 0
    tally = Counter() if tally is None else tally
    for piece in slices:
        yield from _read_slice(piece, text_field, done, tally)
        if not is_url(piece.location) and stat(piece.location) != piece.file:
            raise DamagedData(
                f"{piece.location}: changed while it was read; the same command reads it again"
            )
        done += piece.size


def describe_tally(tally: Counter[str]) -> list[str]:
    """A line for each kind of file: how many bytes its files hold, and what of them was read."""
    lines = []
    for kind in KINDS:
        if number := tally[f"{kind.name}: files"]:
            parts = [f"{tally[f'{kind.name}: text']:,} of text"]
            rests = [kind.rest, *DAMAGE]
            parts += [f"{n:,} of {rest}" for rest in rests if (n := tally[f"{kind.name}: {rest}"])]
            size = tally[f"{kind.name}: bytes"]
            lines.append(f"read: {number:,} of {kind.name}, {size:,} bytes: {', '.join(parts)}")
    for what in ("columns", "left out"):
        names = [name for name in tally if name.startswith(f"{what}: ")]
        listed = ", ".join(f"{name.partition(': ')[2]} ({tally[name]:,})" for name in names)
        if listed:
            lines.append(f"{'not asked for: columns' if what == 'columns' else what}: {listed}")
    return lines


def _read_slice(piece: Slice, text_field: str, done: int, tally: Counter[str]) -> Iterator[Reading]:
    kind = next((kind for kind in KINDS if kind.name == piece.kind), None)
    name = hide_passwords(piece.location)
    try:
        raw = open_file(piece.location) if kind is None else kind.open(piece.location)
    except OSError as error:
        raise UserError(f"{name}: cannot be opened: {_explain(error)}") from None
    with raw:
        if kind is None or kind.is_text:
            raw.seek(piece.begin)
            # The lines before a slice are not counted.
            name = f"{name}, from byte {piece.begin:,} on" if piece.begin else name
        for member, file in open_streams(name, raw, split_query(piece.location)[0], tally):
            end = math.inf if piece.size == piece.file.size else piece.end
            stream = Stream(member, file, text_field, piece.begin, end)
            for document, part in _read_stream(stream, kind, tally):
                at = raw.tell() - piece.begin if stream.done is None else stream.done
                yield Reading(document, member, done + min(at, piece.size), stream.head, part)


def _read_stream(
    stream: Stream, kind: Kind | None, tally: Counter[str]
) -> Iterator[tuple[Document, str]]:
    """Each document, and what its number counts."""
    counted = 0
    try:
        if kind is None:
            head = stream.file.peek(HEAD_BYTES)[:HEAD_BYTES]
            kind = find_kind(head, stream.name, stream.text_field)
            if not kind.is_text:
                raise UserError(f"{stream.name}: {kind.name} in a packed file: unpack it")
        for document in kind.read(stream):
            text = sum(len(line.encode()) for line in document.lines)
            size = stream.size - counted
            counted = stream.size
            tally[f"{kind.name}: text"] += text
            tally[f"{kind.name}: {document.damage or kind.rest}"] += size - text
            yield document, kind.part
    except READ_ERRORS as error:
        raise DamagedData(
            f"{stream.name}: cannot be read after line {stream.line}: {error}"
        ) from None
    tally[f"{kind.name}: {kind.rest}"] += stream.size - counted
    tally[f"{kind.name}: bytes"] += stream.size
    tally[f"{kind.name}: files"] += not stream.begin
    for column in stream.other_columns if not stream.begin else ():
        tally[f"columns: {column}"] += 1
    for what, number in stream.left_out.items():
        tally[f"left out: {what}"] += number


def _explain(error: OSError) -> str:
    return error.strerror or "no such file"  # fsspec's have no words


def _cut_file(location: str, text_field: str) -> Iterator[Slice]:
    name = hide_passwords(location)
    try:
        info = stat(location)
        suffix = os.path.splitext(split_query(location)[0])[1]
        packed = suffix in {*UNPACKERS, *_SHORT, ".tar"}
        kind = None if packed else find_kind(read_bytes(location, HEAD_BYTES), name, text_field)
    except OSError as error:
        raise UserError(f"{name}: cannot be opened: {_explain(error)}") from None
    begin = 0
    for end in _list_ends(location, kind, info.size, text_field):
        yield Slice(location, begin, end, info, kind.name if kind else "")
        begin = end


def _list_ends(location: str, kind: Kind | None, size: int, text_field: str) -> Iterator[int]:
    """Where the slices of a file end."""
    at = 0
    if kind and kind.cut:
        for size in kind.cut(location, text_field):
            if size - at >= UNIT_BYTES:
                yield (at := size)
    elif kind and kind.begins and size > UNIT_BYTES and not is_url(location):
        with open(location, "rb") as file:
            while size - at > UNIT_BYTES:
                yield (at := _find_document(file, kind.begins, at + UNIT_BYTES, size))
    if at < size or not at:
        yield size


def _find_document(
    file: IO[bytes], begins: Callable[[str, bool], bool], offset: int, size: int
) -> int:
    """Where the first document that opens after `offset` begins; `size` if none does."""
    file.seek(offset)
    while (raw := file.readline(1 << 16)) and not raw.endswith(b"\n"):
        pass  # the rest of a line that began before `offset`
    at = file.tell()
    after_blank = False
    while raw := file.readline(MAX_LINE_BYTES):
        text = raw.decode("utf-8", "replace").strip()
        if begins(text, after_blank):
            return at
        at = file.tell()
        after_blank = not text
    return size


def open_streams(label: str, raw: Any, name: str, tally: Counter[str]) -> Iterator[tuple[str, Any]]:
    """(what to call it in messages, unpacked file) of a file, or of every member of a tar.

    `tally` counts the links and the like in a tar. Raises DamagedData for a tar that is cut short
    or damaged; of the others, reading does.
    """
    stem, suffix = os.path.splitext(name)
    if suffix in _SHORT:
        yield from open_streams(label, raw, stem + _SHORT[suffix], tally)
    elif suffix in UNPACKERS:
        unpacked = io.BufferedReader(UNPACKERS[suffix](raw), _BUFFER_BYTES)
        yield from open_streams(label, unpacked, stem, tally)
    elif suffix == ".tar":
        yield from _open_members(label, raw, tally)
    else:
        yield label, raw


class _Member(tarfile.TarInfo):
    """The header of a member; to tarfile a damaged one is the end of the tar."""

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):  # the real end
                raise
            raise tarfile.ReadError(f"the tar is cut short or damaged: {error}") from None


def _open_members(label: str, raw: Any, tally: Counter[str]) -> Iterator[tuple[str, Any]]:
    """The members of a tar, and of others that were put behind it."""
    is_first = True
    try:
        while is_first or raw.peek(1):
            is_first = False
            # It reads whole blocks, and none ahead: behind the end another tar may begin.
            block = tarfile.BLOCKSIZE
            with tarfile.open(fileobj=raw, mode="r|", bufsize=block, tarinfo=_Member) as tar:
                for member in tar:
                    if member.isreg():
                        where = f"{label}: {member.name}"
                        content = tar.extractfile(member)
                        yield from open_streams(where, content, member.name, tally)
                    elif not member.isdir():
                        tally["left out: links and special files in tars"] += 1
            zeros = raw.read(block)  # the second block of the end, and what fills up the record
            while zeros and not any(zeros) and raw.peek(1)[:1] == b"\0":
                zeros = raw.read(block)
            if not zeros or any(zeros):
                raise tarfile.ReadError("the tar is cut short or damaged")
    except READ_ERRORS as error:
        raise DamagedData(f"{label}: cannot be read: {error}") from None
