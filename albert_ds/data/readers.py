"""Documents from streams of bytes: WikiExtractor text, plain text or JSON lines.

    stream -> lines -> documents -> sentences

What a stream holds is seen from its first line that is not blank: `<doc ...>` elements of
WikiExtractor; JSON lines (`{...}` with a "text"); else plain text, a blank line between documents.
A document that cannot be read as it should be is passed on as damaged, for the caller to count.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

LINE_KINDS = ("paragraph", "sentence", "wrapped")
MAX_LINE_BYTES = 16 << 20  # a longer line is damage, and never in memory
MAX_DOCUMENT_BYTES = 16 << 20  # text without a blank line is cut there

# Why a document is set aside.
WRONG_ENCODING = "wrong_encoding"  # not UTF-8, or half of a surrogate pair
NUL_BYTES = "nul_bytes"
OVERLONG_LINE = "overlong_line"
NOT_JSON = "not_json"
NO_TEXT_FIELD = "no_text_field"
UNCLOSED_DOC = "unclosed_doc"  # a <doc> before the last one was closed, or at the end
OUTSIDE_DOC = "outside_doc"  # text between </doc> and <doc>
DAMAGE = (
    WRONG_ENCODING,
    NUL_BYTES,
    OVERLONG_LINE,
    NOT_JSON,
    NO_TEXT_FIELD,
    UNCLOSED_DOC,
    OUTSIDE_DOC,
)


class Document(NamedTuple):
    lines: list[str]  # stripped, none of them empty; an empty document has none
    line: int  # number of its first line in its stream
    damage: str = ""  # why it is to be set aside, one of DAMAGE
    cut: bool = False  # its text goes on in the next one


class Line(NamedTuple):
    number: int
    text: str  # stripped
    damage: str = ""


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say where text is and what it looks like; alike wherever text is read."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="GLOB",
        help="paths or URLs of fsspec (http://, s3://, ...): WikiExtractor <doc> elements, JSON "
        "lines, or plain text with a blank line between documents; packed by their .gz, .bz2, "
        ".xz, .zst or .tar; ** descends into folders",
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


def split_documents(
    lines: Iterator[Line], text_field: str = "text", kind: str = ""
) -> Iterator[Document]:
    """Every document of a stream, in order, empty and damaged ones included.

    `kind` of find_kind, where the stream does not begin where its file does.
    """
    for first in lines:
        if not first.text and not first.damage:
            continue
        rest = _chain(first, lines)
        kind = kind or find_kind(first.text)
        if kind == "wiki":
            yield from _split_wiki(rest)
        elif kind == "json":
            yield from _split_json(rest, text_field)
        else:
            yield from _split_text(rest)


def find_kind(first_line: str) -> str:
    """ "wiki", "json" or "text", by the first line that is not blank."""
    if begins_document(first_line, "wiki", after_blank=False):
        return "wiki"
    return "json" if first_line.startswith("{") else "text"


def begins_document(line: str, kind: str, *, after_blank: bool) -> bool:
    """Whether a stripped line opens a document."""
    if kind == "wiki":
        return line.startswith("<doc ")
    return bool(line) and (kind == "json" or after_blank)


def read_lines(file: IO[bytes], *, is_start: bool = True) -> Iterator[Line]:
    """The lines of a stream; `is_start` where a byte order mark may stand before the first."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(1 << 16)
            yield Line(number, "", OVERLONG_LINE)
        elif b"\0" in raw:
            yield Line(number, "", NUL_BYTES)
        else:
            yield _decode(raw, number, "utf-8-sig" if is_start and number == 1 else "utf-8")


def _decode(raw: bytes, number: int, encoding: str) -> Line:
    try:
        return Line(number, raw.decode(encoding).strip())
    except UnicodeDecodeError:
        return Line(number, "", WRONG_ENCODING)


def split_sentences(lines: list[str], kind: str, language: str = "en") -> list[str]:
    """The sentences of a document whose lines are paragraphs, sentences or wrapped text."""
    if kind == "sentence":
        return lines
    from sentencex import segment  # ty: ignore[import-not-found]

    paragraphs = [" ".join(lines)] if kind == "wrapped" else lines
    # Blanks that are not ASCII (a no-break space after an initial) make sentencex 1.0.32 panic.
    spaced = (" ".join(paragraph.split()) for paragraph in paragraphs)
    sentences = (s.strip() for paragraph in spaced for s in segment(language, paragraph))
    return [sentence for sentence in sentences if sentence]


def _chain(first: Line, rest: Iterator[Line]) -> Iterator[Line]:
    yield first
    yield from rest


def _split_wiki(lines: Iterable[Line]) -> Iterator[Document]:
    document: list[str] = []
    opened = stray = 0  # the lines where a <doc> that is not closed, or text outside one, began
    damage = ""
    for number, text, damaged in lines:
        opens, closes = begins_document(text, "wiki", after_blank=False), text == "</doc>"
        if opened and closes:
            yield Document(document, opened, damage)
            opened = 0
        elif opens:
            if opened or stray:
                yield Document([], opened or stray, UNCLOSED_DOC if opened else OUTSIDE_DOC)
            document, opened, stray, damage = [], number, 0, ""
        elif opened:
            damage = damage or damaged
            if text:
                document.append(text)
        elif (text or damaged) and not stray:
            stray = number
    if opened or stray:
        yield Document([], opened or stray, UNCLOSED_DOC if opened else OUTSIDE_DOC)


def _split_text(lines: Iterable[Line]) -> Iterator[Document]:
    document: list[str] = []
    begun = size = 0
    damage = ""
    for number, text, damaged in lines:
        if text or damaged:
            if size + len(text) > MAX_DOCUMENT_BYTES:
                yield Document(document, begun, damage, cut=True)
                document, begun, size = [], 0, 0
            begun = begun or number
            damage = damage or damaged
            size += len(text)
            document.append(text)
        elif begun:
            yield Document(document, begun, damage)
            document, begun, size, damage = [], 0, 0, ""
    if begun:
        yield Document(document, begun, damage)


def _split_json(lines: Iterable[Line], text_field: str) -> Iterator[Document]:
    for number, line, damaged in lines:
        if damaged:
            yield Document([], number, damaged)
        elif line:
            text, damage = _read_record(line, text_field)
            parts = [part for part in map(str.strip, text.split("\n")) if part]
            yield Document(parts, number, damage)


def _read_record(line: str, text_field: str) -> tuple[str, str]:
    """(text, damage) of a line of JSON."""
    try:
        record = json.loads(line)
    except ValueError:
        return "", NOT_JSON
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        return "", NO_TEXT_FIELD
    if "\0" in text:
        return "", NUL_BYTES
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", WRONG_ENCODING
    return text, ""
