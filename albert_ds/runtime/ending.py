"""How a run begins and ends: a lock that dies with its owner, RUN/exit.json, one line to the user.

Launchers garble exit codes (`srun -K` reports 143 for a 5), so scripts read the file. It is
written before any rank leaves; where it is absent, the run crashed.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from albert_ds.errors import MachineFailed, UserError

# What torch raises when a peer has gone says so in words only.
PEER_LOST = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "NCCL")
GRACE_SECONDS = 2.0  # for rank 0 to write exit.json before a launcher kills it for our exit code


class RunLock:
    """Exclusive ownership of a RUN folder by one process; the kernel frees it when that dies."""

    def __init__(self, output: Path):
        self._file = open(output / ".lock", "a+")  # noqa: SIM115 (held while the run lasts)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            owner = self._file.read().strip()
            self._file.close()
            raise UserError(f"--output {output}: in use by {owner}; wait or stop it") from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def take_possession(output: Path, mesh, write_files: Callable[[], None]) -> RunLock | None:
    """Rank 0 locks RUN, clears the last ending and writes its files; returns the lock. Collective.

    Raises UserError on every rank where RUN is in use or cannot be written.
    """
    from albert_ds.runtime.agreement import raise_first

    lock, error = None, None
    if mesh.rank == 0:
        try:
            output.mkdir(parents=True, exist_ok=True)
            lock = RunLock(output)
            (output / "exit.json").unlink(missing_ok=True)
            write_files()
        except UserError as caught:
            error = caught
        except OSError as caught:
            error = UserError(f"--output {output}: {caught.strerror}; it must be writable")
    raise_first(mesh, error)
    return lock


def conclude(
    world, mesh, lock: RunLock | None, output: Path | None, *, code: int, reason: str, step
) -> None:
    """Tell the user and the scripts how the run ended, then leave together."""
    from albert_ds.runtime.launch import leave_world

    rank, local_rank = (world.rank, world.local_rank) if world else (0, 0)
    if rank == 0 and output is not None and output.is_dir() and (lock or _is_free(output)):
        write_exit(output, code=code, reason=reason, step=step)
    if code != 0 and local_rank == 0:
        say(reason)
    if mesh is None and rank > 0:
        time.sleep(GRACE_SECONDS)
    if mesh is not None:
        leave_world(mesh, together=code != MachineFailed.code)


def _is_free(output: Path) -> bool:
    """Whether no other process owns RUN: its ending is not ours to write."""
    try:
        RunLock(output).release()
    except (UserError, OSError):
        return False
    return True


def write_exit(output: Path, *, code: int, reason: str, step: int | None) -> None:
    """Write RUN/exit.json in one rename."""
    temporary = output / ".exit.json.tmp"
    temporary.write_text(json.dumps({"code": code, "reason": reason, "step": step}) + "\n")
    os.replace(temporary, output / "exit.json")


def say(message: str) -> None:
    """One line on stderr."""
    print(f"albert-ds: {' '.join(message.split())}", file=sys.stderr, flush=True)


def name_lost_peer(error: RuntimeError) -> tuple[int, str]:
    """Exit code and line for a collective that failed because a peer has gone.

    Raises the error again where it is anything else: that is a crash of ours.
    """
    if not any(text in str(error) for text in PEER_LOST):
        raise error
    what = str(error).splitlines()[0][:160]
    return MachineFailed.code, f"a peer is missing ({what}); saved checkpoints are untouched"
