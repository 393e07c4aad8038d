"""A build is divided into pieces of work, and a killed build keeps its finished pieces.

A piece is finished when three things hold: its note is in the folder, the note has the identity of
the work (its input and settings), and every file in the note exists with the noted content. Every
other piece is done again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from albert_ds.errors import UserError
from albert_ds.files import write_file
from albert_ds.json_files import check, read_json
from albert_ds.text.mpi import Ranks


def fingerprint(*parts) -> str:
    """The identity of a piece of work: a hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Manifest:
    """The notes of one kind of piece, `kind`-000000.json ... in `folder`."""

    def __init__(self, folder: Path, kind: str, identities: list[str]):
        self._folder = folder
        self._kind = kind
        self._identities = identities

    def find_finished(self, ranks: Ranks) -> tuple[dict[int, dict], int]:
        """(the notes of all finished pieces, how many were damaged). Collective."""
        mine = range(ranks.rank, len(self._identities), ranks.size)
        found = {number: self._read(number) for number in mine}
        everyone = {n: note for notes in ranks.gather(found) for n, note in notes.items()}
        finished = {n: note for n, note in everyone.items() if isinstance(note, dict)}
        return finished, sum(note == "damaged" for note in everyone.values())

    def write(self, number: int, note: dict, files: Mapping[Path, str]) -> dict:
        """Write the note of a finished piece: the sha256 of each of its files, and `note`."""
        note = {
            "identity": self._identities[number],
            "files": {os.path.relpath(path, self._folder): sha for path, sha in files.items()},
            **note,
        }
        write_file(self._path(number), json.dumps(note).encode())
        return note

    def do(
        self,
        ranks: Ranks,
        pieces: list[int],
        work: Callable[[int], tuple[dict, Mapping[Path, str]]],
    ) -> dict[int, dict]:
        """Divide these pieces over the processes and do them; returns all notes. Collective."""
        done = {
            number: self.write(number, *work(number)) for number in pieces[ranks.rank :: ranks.size]
        }
        return {number: note for notes in ranks.gather(done) for number, note in notes.items()}

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._kind}-{number:06d}.json"

    def _read(self, number: int) -> dict | str:
        """The note of a finished piece, else "missing", "changed" or "damaged"."""
        try:
            if not self._path(number).exists():
                return "missing"
            note = read_json(self._path(number))
            check(note, {"identity": str, "files": dict}, "")
            check(note["files"], dict.fromkeys(note["files"], str), "")
        except UserError:
            return "damaged"
        if note["identity"] != self._identities[number]:
            return "changed"
        for name, sha in note["files"].items():
            path = self._folder / name
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha:
                return "damaged"
        return note
