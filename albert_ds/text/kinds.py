"""The kinds of text: how each is told by its first bytes, read and cut; and what is refused.

A kind is one row of KINDS. Its reader turns a stream into documents and knows no other kind.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from albert_ds.base.errors import UserError
from albert_ds.base.storage import open_file, open_parts
from albert_ds.text.documents import (
    Document,
    Stream,
    begins_json,
    begins_text,
    begins_wiki,
    describe_encoding,
    read_json,
    read_text,
    read_wiki,
)
from albert_ds.text.tables import cut_parquet, find_dialect, read_arrow, read_csv, read_parquet

MAX_CONTROLS = 0.1  # of the bytes; beyond it what is in no known encoding is no text
MIN_CONTROLS = 8
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r"})


class Kind(NamedTuple):
    """A kind of text."""

    name: str  # as counts and messages say it
    is_it: Callable[[bytes, str], bool]  # of the first HEAD_BYTES or less, and --text-field
    read: Callable[[Stream], Iterator[Document]]
    rest: str  # what a file has beside the text
    part: str = "line"  # what the number of a document counts
    is_text: bool = True  # what has a magic number of its own is not, and is never packed
    # Where a file may be cut: before a stripped line that begins a document, after a blank one or
    # not; or at these bytes of a location, for a text field.
    begins: Callable[[str, bool], bool] | None = None
    cut: Callable[[str, str], Iterable[int]] | None = None
    open: Callable[[str], Any] = open_file


def _starts(*magic: bytes) -> Callable[[bytes, str], bool]:
    return lambda head, text_field: head.startswith(magic) and not _is_clean(head)


def _is_wiki(head: bytes, text_field: str) -> bool:
    return re.match("<doc [^<>\n]*>", _decode(head)) is not None


# {"key": or [{"key": or ["text", "text" or ["text"]
_STRING = r'"(\\.|[^"\\])*"\s*'
_BEGINS_JSON = re.compile(rf'(\[\s*)?\{{\s*{_STRING}:|\[\s*{_STRING}(,\s*"|\])')


def _is_json(head: bytes, text_field: str) -> bool:
    """Whether the first line is an object or array, or begins as one that is cut off or damaged.

    A JSON array is no JSON lines: its lines are damaged, which its user is told.
    """
    text = _decode(head)
    try:
        value = json.loads(text.split("\n", 1)[0])
    except (ValueError, RecursionError):
        return _BEGINS_JSON.match(text) is not None
    is_list = isinstance(value, list) and isinstance(next(iter(value), 0), dict | list | str)
    return is_list or isinstance(value, dict)


def _is_csv(head: bytes, text_field: str) -> bool:
    return find_dialect(head, text_field) is not None


# In this order; what no row takes is plain text, the last one.
KINDS = [
    Kind(
        "Parquet",
        is_it=_starts(b"PAR1"),
        read=read_parquet,
        rest="blanks and line ends",
        part="row",
        is_text=False,
        cut=cut_parquet,
        open=open_parts,
    ),
    Kind(
        "Arrow",
        # A stream begins with the marker of a message; in a file, one follows the name.
        is_it=_starts(b"\xff\xff\xff\xff", b"ARROW1\0\0"),
        read=read_arrow,
        rest="blanks and line ends",
        part="row",
        is_text=False,
    ),
    Kind(
        "WikiExtractor",
        is_it=_is_wiki,
        read=read_wiki,
        rest="tags, blanks and line ends",
        begins=begins_wiki,
    ),
    Kind(
        "JSON lines",
        is_it=_is_json,
        read=read_json,
        rest="other fields",
        begins=begins_json,
    ),
    Kind("CSV", is_it=_is_csv, read=read_csv, rest="other columns"),
    Kind(
        "plain text",
        is_it=lambda head, text_field: True,
        read=read_text,
        rest="blanks and line ends",
        begins=begins_text,
    ),
]
# How the content of other files begins, and what they are.
_MARKUP = {
    rb"\{\\rtf\d": "RTF: take its text out",
    rb"(?i)\s*<(!doctype\s+html|html|head|body)(\s[^<>]*=[^<>]*)?\s*>": "HTML: take its text out",
    rb"\s*<(\?xml|mediawiki)\b": "XML: take its text out (of Wikipedia's, by WikiExtractor)",
}  # fmt: skip
_BINARY = {
    rb"\x1f\x8b": "gzip: let its name end in .gz",
    rb"BZh[1-9]1AY": "bzip2: let its name end in .bz2",
    rb"\xfd7zXZ\0": "xz: let its name end in .xz",
    rb"\x28\xb5\x2f\xfd": "Zstandard: let its name end in .zst",
    rb".{257}ustar": "a tar: let its name end in .tar",
    rb"PK\x03\x04": "a zip, as .docx, .xlsx and .epub are: take its text out",
    rb"7z\xbc\xaf|Rar!\x1a": "an archive: unpack it",
    rb"%PDF-": "a PDF: take its text out",
    rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*": "a picture",
    rb"RIFF.{4}(WAVE|WEBP|AVI )|ID3[\2-\4]|OggS\0": "a picture or a sound",
    rb"\x7fELF|MZ\x90\0": "a program",
    rb"SQLite format 3\0": "an SQLite database: export the text as CSV",
    rb"Obj\x01|\x93NUMPY|\x89HDF|FEA1|PARE|\x80[\x02-\x05]": "binary data: write Parquet",
}  # fmt: skip


def find_kind(head: bytes, name: str, text_field: str) -> Kind:
    """The kind of a file; `head` are its first HEAD_BYTES or less.

    Raises UserError, naming the file, for anything but a kind of text.
    """
    kind = next(kind for kind in KINDS if kind.is_it(head, text_field))
    if not kind.is_text:
        return kind
    head = head.removeprefix(codecs.BOM_UTF8)
    for pattern, what in (_MARKUP if _is_clean(head) else {**_BINARY, **_MARKUP}).items():
        if re.match(pattern, head, re.DOTALL):
            raise UserError(f"{name}: looks like {what}")
    controls = _count_controls(head)
    if controls > max(MIN_CONTROLS, MAX_CONTROLS * len(head)) and not describe_encoding(head):
        raise UserError(f"{name}: looks like binary data, not text")
    if kind.begins and b"\r" in head.rstrip() and b"\n" not in head:
        raise UserError(f"{name}: its lines end in CR alone: convert it with tr '\\r' '\\n'")
    return kind


def _decode(head: bytes) -> str:
    return head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace").lstrip()


def _count_controls(head: bytes) -> int:
    return len(head) - len(head.translate(None, _CONTROLS))


def _is_clean(head: bytes) -> bool:
    """Whether it can be text, which may begin with the letters of a magic number."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # it may be cut in a character
    except UnicodeDecodeError:
        return False
    return not _count_controls(head)
