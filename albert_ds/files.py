"""Write files atomically: a reader finds the old content or the new one, never a part."""

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from albert_ds.errors import UserError

# It also holds ds_configs/ and slurm/: in a clone as links, in an installed package as copies.
PACKAGE = Path(__file__).parent


def write_file(path: Path, content: bytes | str, *, sync: bool = False) -> str:
    """Replace the file at `path` in one rename; returns the sha256 of what was written.

    `sync` also flushes the file to the disk before it gets its name. Raises OSError; then the old
    file is untouched and the partial one is removed.
    """
    content = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        if sync:
            sync_file(partial)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
    return hashlib.sha256(content).hexdigest()


def write_json(path: Path, content: dict) -> None:
    """Replace the JSON file at `path`. Raises OSError."""
    write_file(path, json.dumps(content, indent=1) + "\n")


def refuse_input(output: Path, inputs: Iterable[Path | str]) -> None:
    """Raise UserError if `output` is one of `inputs`, which writing would destroy."""
    for source in inputs:
        if output.exists() and Path(source).exists() and output.samefile(source):
            raise UserError(f"--output {output}: is the input {source}; name another one")


def sync_file(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compute_crc32(path: Path) -> int:
    """CRC-32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
