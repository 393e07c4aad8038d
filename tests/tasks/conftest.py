"""A small vocabulary, limits for small texts, and the real files where this machine has them."""

import tarfile
from pathlib import Path

import pytest

from albert_ds.tasks.recipes import Lengths

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def lengths() -> Lengths:
    return Lengths(sequence=48, question=10, stride=8, answer=30)


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A function: the folder that one of the shared archives unpacks to; skips without it."""
    opened: dict[str, Path] = {}

    def open_archive(name: str) -> Path:
        path = SHARED / f"{name}.tar.xz"
        if not path.is_file():
            pytest.skip(f"{path} is not on this machine")
        if name not in opened:
            opened[name] = tmp_path_factory.mktemp(name)
            with tarfile.open(path) as archive:
                archive.extractall(opened[name], filter="data")
        return opened[name] / name

    return open_archive
