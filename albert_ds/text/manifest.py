"""A build is divided into pieces of work, and a killed build keeps its finished pieces.

A piece is finished when three things hold: its note is in the folder, the note has the identity of
the work (its input and settings), and every file in the note exists with the noted content. Every
other piece is done again.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from albert_ds.base.errors import UserError
from albert_ds.base.files import write_file
from albert_ds.base.json_files import check, read_json


class Piece(NamedTuple):
    """A piece of work."""

    path: Path  # of its note: FOLDER/unit-000000.json, FOLDER/range-000000.json, ...
    identity: str
    input: Any  # a unit of text, or a range of shards
    size: int  # in bytes, or in shards


def fingerprint(*parts) -> str:
    """The identity of a piece of work: a hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_note(piece: Piece, note: dict, files: Mapping[Path, str]) -> dict:
    """Write the note of a finished piece: the sha256 of each of its files, and `note`."""
    note = {
        "identity": piece.identity,
        "files": {os.path.relpath(path, piece.path.parent): sha for path, sha in files.items()},
        **note,
    }
    write_file(piece.path, json.dumps(note).encode())
    return note


def read_note(piece: Piece, *, proves_files: bool = True) -> dict | str:
    """The note of a finished piece, else "missing", "changed" or "damaged".

    proves_files: whether its files are read; else whoever reads them proves what they hold.
    """
    try:
        if not piece.path.exists():
            return "missing"
        note = read_json(piece.path)
        check(note, {"identity": str, "files": dict}, "")
        check(note["files"], dict.fromkeys(note["files"], str), "")
    except UserError:
        return "damaged"
    if note["identity"] != piece.identity:
        return "changed"
    for name, sha in note["files"].items():
        path = piece.path.parent / name
        if not path.is_file():
            return "damaged"
        if proves_files and hashlib.sha256(path.read_bytes()).hexdigest() != sha:
            return "damaged"
    return note
