"""What a file holds, by its first bytes: text of a known kind, a table, or what is refused."""

import codecs
import re

from albert_ds.base.errors import UserError
from albert_ds.text.documents import begins_document, describe_encoding
from albert_ds.text.tables import find_delimiter

PARQUET, ARROW = "parquet", "arrow"
HEAD_BYTES = 1 << 16
MAX_CONTROLS = 0.1  # of the bytes; beyond it what is in no known encoding is no text
MIN_CONTROLS = 8
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r"})
_TABLES = {
    b"PAR1": PARQUET,
    b"\xff\xff\xff\xff": ARROW,  # a stream; the marker of a message
    b"ARROW1\0\0": ARROW,  # a file; a stream follows
}
# How the content of other files begins, and what they are.
_OTHERS = {
    rb"\x1f\x8b": "gzip: let its name end in .gz",
    rb"BZh[1-9]1AY": "bzip2: let its name end in .bz2",
    rb"\xfd7zXZ\0": "xz: let its name end in .xz",
    rb"\x28\xb5\x2f\xfd": "Zstandard: let its name end in .zst",
    rb".{257}ustar": "a tar: let its name end in .tar",
    rb"PK\x03\x04": "a zip, as .docx, .xlsx and .epub are: take its text out",
    rb"7z\xbc\xaf|Rar!\x1a": "an archive: unpack it",
    rb"%PDF-": "a PDF: take its text out",
    rb"\{\\rtf": "RTF: take its text out",
    rb"(?i)\s*<(!doctype\s+html|html|head|body)\b": "HTML: take its text out",
    rb"\s*<(\?xml|mediawiki)\b": "XML: take its text out (of Wikipedia's, by WikiExtractor)",
    rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*": "a picture",
    rb"RIFF.{4}(WAVE|WEBP|AVI )|ID3[\2-\4]|OggS\0": "a picture or a sound",
    rb"\x7fELF|MZ\x90\0": "a program",
    rb"SQLite format 3\0": "an SQLite database: export the text as CSV",
    rb"Obj\x01|\x93NUMPY|\x89HDF|FEA1|PARE|\x80[\x02-\x05]": "binary data: write Parquet",
}  # fmt: skip


def find_kind(head: bytes, name: str, text_field: str) -> str:
    """ "wiki", "json", "text", PARQUET, ARROW, or what separates the fields of a table.

    `head` are the first HEAD_BYTES or less. Raises UserError, naming the file, for anything else.
    """
    head = head.removeprefix(codecs.BOM_UTF8)
    for magic, kind in _TABLES.items():
        if head.startswith(magic):
            return kind
    for pattern, what in _OTHERS.items():
        if re.match(pattern, head, re.DOTALL):
            raise UserError(f"{name}: looks like {what}")
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if controls > max(MIN_CONTROLS, MAX_CONTROLS * len(head)) and not describe_encoding(head):
        raise UserError(f"{name}: looks like binary data, not text")
    text = head.decode("utf-8", "replace").lstrip()
    first = text.split("\n", 1)[0].strip()
    kind = "text"
    if begins_document(first, "wiki", after_blank=False):
        kind = "wiki"
    # A JSON array is no JSON lines: its lines are damaged, which its user is told.
    elif re.match(r"\{|\[\s*([{\"]|$)", first):
        kind = "json"
    elif delimiter := find_delimiter(text, text_field):
        return delimiter
    if "\r" in text.rstrip() and "\n" not in text:
        raise UserError(f"{name}: its lines end in CR alone: convert it with tr '\\r' '\\n'")
    return kind
