"""Documents from files, read as a stream: WikiExtractor text, plain text or JSON lines.

    paths -> lines of bytes (.gz and .zst unpacked) -> documents -> sentences

What a file holds is seen from its first line that is not blank: `<doc ...>` elements of
WikiExtractor; JSON lines (`{...}` with a "text"); else plain text, a blank line between documents.
"""

import argparse
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from albert_ds.errors import DamagedData, UserError

LINE_KINDS = ("paragraph", "sentence", "wrapped")


class Document(NamedTuple):
    lines: list[str]  # stripped, none of them empty
    bytes_read: int  # of all the files so far, as they are stored; for showing progress


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say where text is and what it looks like; alike wherever text is read."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="GLOB",
        help="text files, packed ones by their .gz or .zst: WikiExtractor <doc> elements, JSON "
        "lines, or plain text with a blank line between documents; ** descends into folders",
    )
    add(
        "--lines",
        choices=LINE_KINDS,
        default="paragraph",
        help="what a line of a document is: a paragraph, which is split into sentences; a "
        "sentence, taken as it is; or wrapped text, joined and then split (paragraph)",
    )
    add("--language", default="en", help="whose rules end a sentence, as a code (en)")
    add("--text-field", default="text", help="the field of JSON lines that holds the text (text)")


def find_inputs(patterns: Iterable[str]) -> list[Path]:
    """The files that match the glob patterns (`**` descends), sorted, each once."""
    found: set[str] = set()
    for pattern in patterns:
        names = [pattern, *glob.glob(pattern, recursive=True)]  # a name may look like a pattern
        matches = [name for name in names if Path(name).is_file()]
        if not matches:
            hint = (
                f"; for the files in this folder: '{pattern}/**'" if Path(pattern).is_dir() else ""
            )
            raise UserError(f"--input {pattern}: matches no file{hint}")
        found.update(matches)
    return [Path(name) for name in sorted(found)]


def read_documents(paths: Iterable[Path], text_field: str = "text") -> Iterator[Document]:
    """Every document of the files, in order, empty ones included (`lines` is then empty).

    Raises UserError for a file that cannot be opened, DamagedData naming file and line for one
    that cannot be read through.
    """
    done = 0
    for path in paths:
        try:
            raw = path.open("rb")
        except OSError as error:
            raise UserError(f"{path}: cannot be opened: {error.strerror}") from None
        with raw:
            for lines in _split_documents(path, _read_lines(path, raw), text_field):
                yield Document(lines, done + raw.tell())
            done += raw.tell()


def split_sentences(lines: list[str], kind: str, language: str = "en") -> list[str]:
    """The sentences of a document whose lines are paragraphs, sentences or wrapped text."""
    if kind == "sentence":
        return lines
    from sentencex import segment  # ty: ignore[import-not-found]

    paragraphs = [" ".join(lines)] if kind == "wrapped" else lines
    sentences = (s.strip() for p in paragraphs for s in segment(language, p))
    return [sentence for sentence in sentences if sentence]


def _read_lines(path: Path, raw: io.BufferedReader) -> Iterator[tuple[int, str]]:
    """(line number, stripped line) of a file, unpacked as its name says."""
    number = 0
    try:
        for number, line in enumerate(_unpack(path, raw), 1):
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError:
        raise DamagedData(f"{path}: line {number} is not UTF-8") from None
    except (EOFError, OSError, zlib.error) as error:
        raise DamagedData(f"{path}: cannot be read after line {number}: {error}") from None


def _unpack(path: Path, raw: io.BufferedReader) -> Iterable[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFrames(raw), 1 << 20)
    return raw


class _ZstdFrames(io.RawIOBase):
    """Zstandard frames as a readable file that, unlike the library's own, notices a cut."""

    def __init__(self, raw: io.BufferedReader):
        import zstandard

        self._raw = raw
        self._unpacker = zstandard.ZstdDecompressor()
        self._error = zstandard.ZstdError
        self._frame = self._unpacker.decompressobj()
        self._started = False  # whether the current frame has had any input
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._started = self._unpacker.decompressobj(), False
            packed = packed or self._raw.read(1 << 17)
            if not packed:
                if self._started:
                    raise EOFError("the last frame is cut short")
                return 0
            self._started = True
            try:
                self._ready = self._frame.decompress(packed)
            except self._error as error:
                raise OSError(str(error)) from None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _split_documents(
    path: Path, lines: Iterator[tuple[int, str]], text_field: str
) -> Iterator[list[str]]:
    for number, line in lines:
        if not line:
            continue
        rest = _chain((number, line), lines)
        if line.startswith("<doc "):
            yield from _split_wiki(path, rest)
        elif line.startswith("{"):
            yield from _split_json(path, rest, text_field)
        else:
            yield from _split_text(rest)


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _split_wiki(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[list[str]]:
    document: list[str] = []
    opened = 0  # the line of the <doc> that is not closed yet
    for number, line in lines:
        if line.startswith("<doc "):
            if opened:
                break
            document, opened = [], number
        elif line == "</doc>" and opened:
            yield document
            opened = 0
        elif line and not opened:
            raise DamagedData(f"{path}: line {number} lies outside <doc> ... </doc>: {line[:60]}")
        elif line:
            document.append(line)
    if opened:
        raise DamagedData(f"{path}: the <doc> of line {opened} is never closed")


def _split_text(lines: Iterator[tuple[int, str]]) -> Iterator[list[str]]:
    document: list[str] = []
    for _, line in lines:
        if line:
            document.append(line)
        elif document:
            yield document
            document = []
    if document:
        yield document


def _split_json(
    path: Path, lines: Iterator[tuple[int, str]], text_field: str
) -> Iterator[list[str]]:
    for number, line in lines:
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DamagedData(f"{path}: line {number} is not JSON: {error}") from None
        text = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DamagedData(f'{path}: line {number} has no text under "{text_field}"')
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DamagedData(
                f"{path}: line {number} is not Unicode: half of a surrogate pair"
            ) from None
        yield [part for part in map(str.strip, text.split("\n")) if part]
