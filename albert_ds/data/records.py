"""One stored sequence as bytes, little-endian: what a shard holds under one key.

crc32 of all that follows  u32 | number of sentences S  u32 | document  u64 |
ends of the S sentences | token ids        both in the token dtype of index.json
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np

_HEADER = struct.Struct("<IIQ")
_CHECKED = struct.Struct("<IQ")  # the header without its crc32


class Sequence(NamedTuple):
    """The sentences of one stored sequence."""

    document: int  # the same number: the same document
    ends: np.ndarray  # [S] one past the last token of each sentence; the last one is T
    ids: np.ndarray  # [T] token ids without [CLS] and [SEP]


def token_dtype(vocab_size: int) -> str:
    """Narrowest unsigned type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def pack_sequence(document: int, ends: list[int], ids: list[int], dtype: np.dtype) -> bytes:
    """The bytes of one sequence."""
    body = np.array(ends + ids, dtype).tobytes()
    checked = _CHECKED.pack(len(ends), document) + body
    return struct.pack("<I", zlib.crc32(checked)) + checked


def read_document(content: bytes, offset: int) -> np.uint64:
    """The document of the record at `offset`, unchecked."""
    return np.uint64(_HEADER.unpack_from(content, offset)[2])


def unpack_sequence(record: bytes, dtype: np.dtype, vocab_size: int) -> Sequence:
    """Inverse of `pack_sequence`; ValueError says what is wrong with a damaged record."""
    if len(record) < _HEADER.size or (len(record) - _HEADER.size) % dtype.itemsize:
        raise ValueError(f"{len(record)} bytes is not the length of a record")
    crc, sentences, document = _HEADER.unpack_from(record)
    if zlib.crc32(memoryview(record)[4:]) != crc:
        raise ValueError("its checksum is wrong")
    body = np.frombuffer(record, dtype, offset=_HEADER.size)
    ends, ids = body[:sentences], body[sentences:]
    if not 0 < sentences < len(body) or ends[-1] != len(ids):
        raise ValueError(f"its {sentences} sentences do not end at its {len(ids)} tokens")
    if ids.max() >= vocab_size:
        raise ValueError(f"token id {ids.max()} is not under the vocabulary size {vocab_size}")
    return Sequence(document, ends, ids)
