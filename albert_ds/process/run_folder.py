"""The RUN folder's lock and its record of versions."""

import fcntl
import os
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from albert_ds.errors import MachineFailed, UserError, name_os_error
from albert_ds.process.ending import UNTOUCHED, add_to_history
from albert_ds.process.world import name_device


class RunLock:
    """Exclusive ownership of a RUN folder. The kernel releases it when the process dies."""

    def __init__(self, output: Path):
        self._path = output / ".lock"
        self._file = open(self._path, "a+")  # noqa: SIM115 (open during the run)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            owner = self._file.read().strip()
            self._file.close()
            raise UserError(f"--output {output}: in use by {owner}; wait or stop it") from error
        # A loader's worker would hold the lock for seconds after a killed trainer.
        os.register_at_fork(after_in_child=self._file.close)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}")
        self._file.flush()

    def find_loss(self) -> MachineFailed | None:
        """The error to end with where the file at RUN/.lock is no longer the one that was locked.

        RUN was deleted, renamed or unmounted then, and another run may own the path.
        """
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return None
            found = "it is another file now"
        except OSError as error:
            found = error.strerror
        return MachineFailed(
            f"{self._path}: {found}: {self._path.parent} was deleted, renamed, replaced or "
            "unmounted during the run; nothing more was written there"
        )

    def release(self) -> None:
        self._file.close()


def lock_run_folder(output: Path, mesh, write_files: Callable[[], None]) -> RunLock | None:
    """Lock RUN, delete the last exit.json, write the run's files and its start, all on rank 0.
    Collective.

    Returns the lock, None on other ranks. Raises UserError or MachineFailed on every rank where RUN
    is in use or cannot be written.
    """
    from albert_ds.parallel.consensus import raise_first_error

    lock, error = None, None
    if mesh.rank == 0:
        try:
            output.mkdir(parents=True, exist_ok=True)
            lock = RunLock(output)
            (output / "exit.json").unlink(missing_ok=True)
            write_files()
            facts = {"machine": os.uname().nodename, "device": name_device()}
            add_to_history(output, "start", **facts, ranks=mesh.world_size)
        except UserError as caught:
            error = caught
        except OSError as caught:
            error = name_os_error(caught, UNTOUCHED)
    raise_first_error(mesh, error)
    return lock


def is_ours(output: Path, lock: RunLock | None) -> bool:
    """Whether RUN is there and no other process owns it, whose exit.json is not ours to write."""
    if lock is not None:
        return lock.find_loss() is None
    if not os.path.isdir(output):
        return False
    try:
        RunLock(output).release()
    except (UserError, OSError):
        return False
    return True


def read_versions() -> dict[str, str | None]:
    """Versions of the libraries that change results, and the commit."""
    libraries = ("torch", "deepspeed", "megatron-core", "webdataset", "sentencepiece", "numpy")
    return {**{name: version(name) for name in libraries}, "commit": read_commit()}


def read_commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None outside a checkout."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+"]
    if not (root / ".git").exists():
        return None
    found = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    return found.stdout.strip() or None
