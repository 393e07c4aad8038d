"""Documents from streams of bytes: WikiExtractor text, plain text or JSON lines.

    stream -> lines -> documents -> sentences

kinds.py tells which of them a stream holds, tables.py reads tables. A document that cannot be read
is passed on as damaged, and the caller counts it.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from charset_normalizer import from_bytes

from albert_ds.base.cli import Parser, Range, check_ranges, flag, integer, path, utf8
from albert_ds.base.errors import UserError
from albert_ds.text.languages import (
    SCRIPTS,
    SENTENCE_ENDS,
    WITHOUT_SPACES,
    join_lines,
    name_languages,
    split_paragraph,
)
from albert_ds.text.segmented import SPACE, ZERO_WIDTH, remove_spaces

SHARE = Range(ge=0, le=1)
SEED = integer(0, (1 << 63) - 1)
LINE_KINDS = ("paragraph", "sentence", "wrapped")
MAX_LINE_BYTES = 16 << 20  # a longer line is damage, and never in memory
HEAD_BYTES = 1 << 16  # of a stream, which tell what it holds
MIN_ODD_BYTES = 8  # not ASCII, from which an encoding is guessed
MAX_DOCUMENT_BYTES = 16 << 20  # longer text is cut there, between two lines

# Why a document is set aside.
DAMAGE = (
    WRONG_ENCODING := "wrong_encoding",  # not UTF-8, or half of a surrogate pair
    NUL_BYTES := "nul_bytes",
    OVERLONG_LINE := "overlong_line",
    NOT_JSON := "not_json",
    NO_TEXT_FIELD := "no_text_field",  # none, or one that stands there twice
    BROKEN_ROW := "broken_row",  # of CSV: not as many fields as the first row, or a wrong quote
    UNCLOSED_DOC := "unclosed_doc",  # a <doc> before the last one was closed, or at the end
    OUTSIDE_DOC := "outside_doc",  # text between </doc> and <doc>
)

_COMMON_ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1256", "shift_jis", "cp932", "euc_jp", "gb18030"),
    *("big5", "cp949", "euc_kr", "utf_16"),
)


class Document(NamedTuple):
    lines: list[str]  # stripped, none of them empty; an empty document has none
    line: int  # number of its first line in its stream, or of its row
    damage: str = ""  # why it is to be set aside, one of DAMAGE
    cut: bool = False  # its text goes on in the next one


class Line(NamedTuple):
    number: int
    text: str  # stripped
    damage: str = ""
    raw: bytes = b""  # as it was read, up to its end
    size: int = 0  # in bytes, its end included


@dataclass
class Stream:
    """A file, a slice of one or a member of a tar, unpacked, from which documents are read."""

    name: str  # in messages
    file: Any  # at `begin`, with peek()
    text_field: str
    begin: int = 0  # of the slice
    end: float = math.inf
    size: int = 0  # bytes that are read; whoever reads from `file` adds them
    line: int = 0  # number of the last one that is read
    head: bytearray = field(default_factory=bytearray)  # the first HEAD_BYTES of it that are read
    done: int | None = None  # bytes of the slice, as stored, where `file` is read here and there
    other_columns: list[str] = field(default_factory=list)  # of a table, beside that of the text
    left_out: Counter[str] = field(default_factory=Counter)  # what is neither text nor damage

    def read_lines(self) -> Iterator[Line]:
        for line in read_lines(self.file, self.end - self.begin, is_start=not self.begin):
            self.size += line.size
            self.line = line.number
            if len(self.head) < HEAD_BYTES:
                self.head.extend(line.raw[:HEAD_BYTES])
            yield line


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """What the text looks like: the same flags wherever text is read."""

    language: str = flag(
        "language of the text, as a code (ko, de, zh, ...): its rules end a sentence, and its "
        "script is checked",
        "CODE",
        default="en",
    )
    lines: str = flag(
        "what a line of a document is: a paragraph, which is split into sentences; a sentence; or "
        "a wrapped line, which is joined with the others and then split",
        default="paragraph",
        choices=LINE_KINDS,
    )
    sentence_ends: str | None = flag(
        "what ends a sentence: the rules of the language, or every space between two letters of a "
        "script without spaces between words",
        default=None,
        choices=SENTENCE_ENDS,
        shown_default="spaces for Thai and Lao, rules for all others",
    )
    segmented: bool = flag(
        "the words of the text are marked, in a language written without spaces: by a segmenter's "
        "spaces or by zero-width spaces, whichever are more; the marks are taken out, and "
        "whole-word masking keeps to the words",
        default=False,
    )
    word_mark: str = SPACE  # of segmented text, SPACE or ZERO_WIDTH, as choose_word_mark finds it
    text_field: str = flag(
        "the field of JSON lines or the column of a table that holds the text",
        "NAME",
        utf8,
        default="text",
    )
    any_script: bool = flag(
        "accept text whose letters are not of the script of the language", default=False
    )
    max_damaged: float = flag(
        "largest share (0 to 1) of the documents that may be damaged: not UTF-8, not JSON, ...; "
        "they are dropped and counted, and above this share nothing is written",
        "SHARE",
        SHARE,
        default=0.01,
    )
    max_unknown: float = flag(
        "largest share (0 to 1) of unknown tokens; above it nothing is written",
        "SHARE",
        SHARE,
        default=0.01,
    )

    def __post_init__(self):
        if self.language not in SCRIPTS:
            raise UserError(
                f"--language {self.language}: must be a code: {name_languages(self.language)}"
            )
        if self.segmented and self.language not in WITHOUT_SPACES:
            raise UserError(
                f"--segmented with --language {self.language}: its own spaces separate its words; "
                f"the flag is for {' '.join(sorted(WITHOUT_SPACES))}"
            )
        check_ranges(self)

    def split(self, lines: list[str]) -> list[str]:
        """The sentences of a document, without the marks of segmented text."""
        lines = self.plain(lines)
        if self.lines == "sentence":
            return lines
        paragraphs = [join_lines(lines)] if self.lines == "wrapped" else lines
        rules = (self.language, self.sentence_ends)
        return [text for paragraph in paragraphs for text in split_paragraph(paragraph, *rules)]

    def plain(self, lines: list[str]) -> list[str]:
        """The lines of a document, without the marks of segmented text."""
        if not self.segmented:
            return lines
        if self.word_mark == SPACE:
            return [remove_spaces(line) for line in lines]
        return [text for line in lines if (text := line.replace(ZERO_WIDTH, "").strip())]

    def space(self, lines: list[str]) -> list[str]:
        """The lines of a document of segmented text, with spaces between words."""
        return [line.replace(self.word_mark, SPACE) for line in lines]


def add_input_flag(parser: Parser) -> None:
    """--input, the same wherever text is read."""
    text = (
        "files, folders or URLs of fsspec (http://, s3://, hf://datasets/OWNER/NAME@REVISION/"
        "..., ...) of Parquet, Arrow, CSV or TSV with a header, JSON lines, WikiExtractor <doc> "
        "elements, or plain text with a blank line between documents; packed by their .gz, .bz2, "
        ".xz, .zst or .tar; ** descends into folders"
    )
    parser.add("--input", text, "GLOB", path, nargs="+", required=True)


def begins_wiki(line: str, after_blank: bool) -> bool:
    """Whether a stripped line opens a document."""
    return line.startswith("<doc ")


def begins_json(line: str, after_blank: bool) -> bool:
    return bool(line)


def begins_text(line: str, after_blank: bool) -> bool:
    return bool(line) and after_blank


def read_lines(file: IO[bytes], size: float = math.inf, *, is_start=True) -> Iterator[Line]:
    """The lines that begin in the next `size` bytes; `is_start` if a byte order mark may come."""
    number = 0
    while size > 0 and (raw := file.readline(MAX_LINE_BYTES)):
        number += 1
        length = len(raw)
        if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(1 << 16)
                length += len(raw)
            yield Line(number, "", OVERLONG_LINE, b"", length)
        elif b"\0" in raw:
            yield Line(number, "", NUL_BYTES, raw, length)
        else:
            encoding = "utf-8-sig" if is_start and number == 1 else "utf-8"
            try:
                line = Line(number, raw.decode(encoding).strip(), "", raw, length)
            except UnicodeDecodeError:
                line = Line(number, "", WRONG_ENCODING, raw, length)
            yield line
        size -= length


def cut_lines(text: str) -> list[str]:
    """The lines of a document, stripped, none of them empty."""
    return [line for line in map(str.strip, text.split("\n")) if line]


def explain_damage(damage: str, head: bytes) -> str:
    """What the first bytes of a stream tell of the cause, for a message; "" if nothing."""
    if damage in (WRONG_ENCODING, NUL_BYTES):
        return describe_encoding(head)
    if damage in (NOT_JSON, NO_TEXT_FIELD) and head.lstrip().startswith(b"["):
        return "; it begins like a JSON array: write one object a line (jq -c '.[]' does)"
    if damage == NO_TEXT_FIELD:
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            pairs = json.loads(head.split(b"\n", 1)[0], object_pairs_hook=list)
            fields = ", ".join(name for name, _ in pairs)
            return f"; the first line has {fields}; --text-field names the one that holds the text"
    return ""


def describe_encoding(head: bytes) -> str:
    """The encoding in which the first bytes of a stream are text, for a message; "" if none is.

    A few odd bytes in ASCII text tell nothing: those are damage.
    """
    if sum(byte > 127 or not byte for byte in head) < MIN_ODD_BYTES:
        return ""
    best = from_bytes(head).best()
    if best is None or best.encoding in ("ascii", "utf_8"):
        return ""
    alike = {best.encoding, *best.could_be_from_charset}  # these read the same text
    encoding = next((name for name in _COMMON_ENCODINGS if name in alike), best.encoding)
    name = encoding.replace("_", "-").upper().replace("CP125", "WINDOWS-125")
    return f"; it looks like {name}: convert it with iconv -f {name} -t UTF-8"


def read_wiki(stream: Stream) -> Iterator[Document]:
    """What stands between <doc ...> and </doc>; empty and damaged documents included."""
    return _split_text(stream.read_lines(), is_wiki=True)


def read_text(stream: Stream) -> Iterator[Document]:
    """What stands between blank lines."""
    return _split_text(stream.read_lines(), is_wiki=False)


def read_json(stream: Stream) -> Iterator[Document]:
    """The text field of every line."""
    for line in stream.read_lines():
        if line.damage:
            yield Document([], line.number, line.damage)
        elif line.text:
            text, damage = _read_record(line.text, stream.text_field)
            yield Document(cut_lines(text), line.number, damage)


def _split_text(lines: Iterable[Line], *, is_wiki: bool) -> Iterator[Document]:
    document: list[str] = []
    begun = stray = size = 0  # the lines where a document, or text outside of one, began
    damage = ""
    for number, text, damaged, *_ in lines:
        is_blank = not text and not damaged
        if is_wiki and begins_wiki(text, False):
            if begun or stray:
                yield Document([], begun or stray, UNCLOSED_DOC if begun else OUTSIDE_DOC)
            document = []
            begun = number
            stray = 0
            size = 0
            damage = ""
        elif begun and (text == "</doc>" if is_wiki else is_blank):
            yield Document(document, begun, damage)
            document = []
            begun = 0
            size = 0
            damage = ""
        elif is_wiki and not begun and not is_blank:
            stray = stray or number
        elif not is_blank:
            if size + len(text) > MAX_DOCUMENT_BYTES:
                yield Document(document, begun, damage, cut=True)
                document = []
                begun = number
                size = 0
            begun = begun or number
            damage = damage or damaged
            size += len(text)
            document.append(text)
    if is_wiki and (begun or stray):
        yield Document([], begun or stray, UNCLOSED_DOC if begun else OUTSIDE_DOC)
    elif begun:
        yield Document(document, begun, damage)


def _read_record(line: str, text_field: str) -> tuple[str, str]:
    """(text, damage) of a line of JSON."""

    def take(pairs: list[tuple[str, Any]]) -> tuple:  # json itself keeps the last of several
        return tuple(value for name, value in pairs if name == text_field)

    try:
        texts = json.loads(line, object_pairs_hook=take)  # an array is a list
    except (ValueError, RecursionError):
        return "", NOT_JSON
    text = texts[0] if isinstance(texts, tuple) and len(texts) == 1 else None
    if not isinstance(text, str):
        return "", NO_TEXT_FIELD
    if "\0" in text:
        return "", NUL_BYTES
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", WRONG_ENCODING
    return text, ""
