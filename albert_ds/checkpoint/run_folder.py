"""The RUN folder's lock and its record of versions."""

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from albert_ds import __version__
from albert_ds.base.errors import MachineFailed, UserError
from albert_ds.base.locks import FileLock
from albert_ds.process.ending import add_to_history
from albert_ds.process.world import name_device


class RunLock:
    """Exclusive ownership of a RUN folder, until the process ends."""

    def __init__(self, run: Path):
        self._path = run / ".lock"
        try:
            self._lock = FileLock(self._path)
        except BlockingIOError as error:
            owner = error.strerror
            raise UserError(f"--output {run}: in use by {owner}; wait or stop it") from None

    def check(self) -> None:
        """Raise MachineFailed if the file at RUN/.lock is no longer the one that was locked.

        RUN was deleted, renamed or unmounted then, and another run may own the path.
        """
        try:
            if self._lock.is_held():
                return
            reason = "it is another file now"
        except OSError as error:
            reason = error.strerror
        raise MachineFailed(
            f"{self._path}: {reason}: {self._path.parent} was deleted, renamed, replaced or "
            "unmounted during the run; nothing more was written there"
        )

    def release(self) -> None:
        self._lock.release()


def start_run(run: Path, ranks: int) -> RunLock:
    """Make and lock RUN, delete the last exit.json, and note the start in its history.

    Raises UserError if another process has locked it, and OSError.
    """
    run.mkdir(parents=True, exist_ok=True)
    lock = RunLock(run)
    (run / "exit.json").unlink(missing_ok=True)
    add_to_history(run, "start", machine=os.uname().nodename, device=name_device(), ranks=ranks)
    return lock


def may_write_exit(run: Path, lock: RunLock | None) -> bool:
    """True if RUN exists, holds a run or nothing, and no other process has locked it."""
    try:
        if lock is not None:
            lock.check()
        elif run.is_dir() and is_run(run):
            RunLock(run).release()
        else:
            return False
    except (UserError, MachineFailed, OSError):
        return False
    return True


def is_run(folder: Path) -> bool:
    """Whether a run has started in this folder, or could: it holds nothing of anybody else."""
    names = {path.name for path in folder.iterdir()}
    return (folder / "history.jsonl").is_file() or not names - {".lock", ".lock.owner", "STOP"}


def read_versions() -> dict[str, str | None]:
    """Versions of this program and of the libraries that change results, and the commit."""
    libraries = ("torch", "deepspeed", "megatron-core", "webdataset", "sentencepiece", "numpy")
    return {"albert-ds": __version__, **{x: version(x) for x in libraries}, "commit": read_commit()}


def read_commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None outside a checkout."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+"]
    if not (root / ".git").exists():
        return None
    described = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    return described.stdout.strip() or None
