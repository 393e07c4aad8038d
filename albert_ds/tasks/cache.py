"""Features are built once for a content: the task's files, the vocabulary and the lengths.

    OUTPUT/features/<sha256>.safetensors

Whatever goes into features goes into their name, so a file that exists is right, wherever it came
from, and several runs may share a folder. Files hold arrays alone; nothing in them is executed.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from albert_ds.errors import UserError
from albert_ds.tasks.features import Features

FORMAT = 1  # of the arrays; a change makes all older files strangers


def fingerprint(files: Iterable[Path], **settings) -> str:
    """sha256 of the files' bytes and of everything else that decides the features."""
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **settings}, sort_keys=True).encode())
    for path in files:
        digest.update(path.name.encode())
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise UserError(f"--data: {path}: {error.strerror}") from None
    return digest.hexdigest()


def cached(folder: Path, key: str, build: Callable[[], Features]) -> Features:
    """The features of that fingerprint: from `folder`, or built and written there."""
    from safetensors.numpy import save_file

    path = folder / f"{key}.safetensors"
    if not path.is_file():
        features = build()
        about = {"counts": features.counts, "choices": features.choices}
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{key}.{os.getpid()}.tmp"
        save_file(features.arrays, temporary, metadata={"about": json.dumps(about)})
        os.replace(temporary, path)
    return read_features(path)


def read_features(path: Path) -> Features:
    """Features as `cached` has written them."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["about"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Features(arrays=arrays, key=path.stem, **about)
