"""Copy built folders to a disk of the node: `--stage DIR`.

    DIR/5b3a09c2f1e47d60/    a copy, named by the first digits of the sha256 of its index.json
        train-000000.tar ... spiece.model ...
        index.json           written last

What is there already is compared with index.json, by size and sha256; what differs is copied again.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import write_file
from albert_ds.base.json_files import MAX_BYTES
from albert_ds.base.storage import join, read_bytes
from albert_ds.data.shards import INDEX_NAME, SPLITS, ShardInfo, list_shards, read_index
from albert_ds.vocab.vocab import CONFIG_NAME, MODEL_NAME

PAUSE = 1.0  # seconds between two looks at a DIR to which another process copies


def find_copy(folder: str, stage: Path) -> Path:
    """Where the copy of a built folder is, or will be."""
    index = read_bytes(join(folder, INDEX_NAME), MAX_BYTES)
    return stage / hashlib.sha256(index).hexdigest()[:16]


def copy_folders(folders: list[str], stage: Path) -> Iterator[int]:
    """Make whole copies of built folders (paths or URLs) in `stage`.

    Yields after each file the bytes that were written, 0 for what was there, so that the caller can
    keep in touch with others meanwhile. One process copies at a time; the next one finds its work.
    Raises UserError, before anything is written, if `stage` is no folder or has too little
    space; DamagedData if a shard is not the one of its index.json.
    """
    node = os.uname().nodename
    if not stage.is_dir():
        raise UserError(f"--stage {stage}: must be a folder; there is none on {node}")
    lock = os.open(stage, os.O_RDONLY)
    try:
        while not _take(lock, stage):
            yield 0
            time.sleep(PAUSE)
        copies = {folder: find_copy(folder, stage) for folder in folders}
        missing: list[tuple[str, ShardInfo]] = []
        for folder, copy in copies.items():
            index = read_index(folder)
            for shard in (shard for split in SPLITS for shard in list_shards(index, split)):
                path = copy / shard.name
                is_there = path.is_file() and path.stat().st_size == shard.bytes
                if not is_there or hashlib.sha256(path.read_bytes()).hexdigest() != shard.sha256:
                    missing.append((folder, shard))
                yield 0
        needed, free = sum(shard.bytes for _, shard in missing), shutil.disk_usage(stage).free
        if needed > free:
            raise UserError(
                f"--stage {stage}: {needed / 1e9:.2f} GB of shards are to be copied, "
                f"{free / 1e9:.2f} GB are free on {node}"
            )
        for copy in copies.values():
            copy.mkdir(exist_ok=True)
            for left_over in copy.glob(".*.partial"):  # of a copy that was killed
                left_over.unlink()
        for folder, shard in missing:
            source = join(folder, shard.name)
            try:
                content = read_bytes(source, shard.bytes + 1)
            except FileNotFoundError:
                raise UserError(f"{source}: this shard of {INDEX_NAME} is missing") from None
            if hashlib.sha256(content).hexdigest() != shard.sha256:
                raise DamagedData(f"{source}: its sha256 is not that of {INDEX_NAME}")
            write_file(copies[folder] / shard.name, content)
            yield shard.bytes
        for folder, copy in copies.items():
            for name in (MODEL_NAME, CONFIG_NAME, INDEX_NAME):
                try:
                    write_file(copy / name, read_bytes(join(folder, name), MAX_BYTES))
                except FileNotFoundError:
                    if name != CONFIG_NAME:  # a model may lie alone
                        raise
    finally:
        os.close(lock)


def _take(lock: int, stage: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # no disk of a node: those have locks
        raise UserError(f"--stage {stage}: no lock can be had there: {error.strerror}") from None
    return True
