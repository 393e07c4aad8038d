"""What a run was made with: versions of the libraries that decide its numbers, and the commit."""

import subprocess
from importlib.metadata import version
from pathlib import Path


def read_versions() -> dict[str, str | None]:
    libraries = ("torch", "deepspeed", "megatron-core", "webdataset", "sentencepiece", "numpy")
    return {**{name: version(name) for name in libraries}, "commit": read_commit()}


def read_commit() -> str | None:
    """The checkout's commit, with a + where files differ from it; None outside a checkout."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+"]
    if not (root / ".git").exists():
        return None
    found = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    return found.stdout.strip() or None
