"""Files as streams of bytes: unpacked as their names end, a tar as its members.

    a.txt    a.txt.gz .bz2 .xz .zst    a.tar    a.tar.gz ...    each member likewise by its name

A member is only ever read, so neither its name nor a link in it can reach another file.
"""

import bz2
import gzip
import io
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

from albert_ds.errors import DamagedData

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# The modules of the standard library and its like notice a cut; other readers of .zst do not.
UNPACKERS: dict[str, Any] = {".gz": gzip, ".bz2": bz2, ".xz": lzma, ".zst": zstd}
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError, tarfile.TarError)
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz"}
_BUFFER_BYTES = 1 << 20


def is_packed(name: str) -> bool:
    return os.path.splitext(name)[1] in {*UNPACKERS, *_SHORT, ".tar"}


def open_streams(label: str, raw: IO[bytes], name: str | None = None) -> Iterator[tuple[str, Any]]:
    """(what to call it in messages, unpacked file) of a file, or of every member of a tar.

    Raises DamagedData for a tar that is cut short or damaged; of the others, reading does.
    """
    stem, suffix = os.path.splitext(name or label)
    if suffix in _SHORT:
        yield from open_streams(label, raw, stem + _SHORT[suffix])
    elif suffix in UNPACKERS:
        unpacked = io.BufferedReader(UNPACKERS[suffix].open(raw, "rb"), _BUFFER_BYTES)
        yield from open_streams(label, unpacked, stem)
    elif suffix == ".tar":
        yield from _open_members(label, raw)
    else:
        yield label, raw


def _open_members(label: str, raw: IO[bytes]) -> Iterator[tuple[str, Any]]:
    try:
        with tarfile.open(fileobj=raw, mode="r|") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                if content is not None:
                    yield from open_streams(f"{label}: {member.name}", content, member.name)
            # To tarfile a damaged header is the end; the real one is a block of zeros and more.
            rest = tar.fileobj.read(tarfile.RECORDSIZE)
    except READ_ERRORS as error:
        raise DamagedData(f"{label}: cannot be read: {error}") from None
    if not rest or any(rest):
        raise DamagedData(f"{label}: the tar is cut short or damaged")
