"""How a run begins and ends: a lock that dies with its owner, RUN/exit.json, one line to the user.

Launchers garble exit codes (`srun -K` reports 143 for a 5), so scripts read the file. It is
written before any rank leaves; where it is absent, the run crashed.
"""

import errno
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
# What the user can mend, and what only time or the machine's keeper can.
WRONG_PATH = (
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EEXIST),
)
STORAGE_GONE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE),
    errno.ETIMEDOUT,
)
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
            error = name_os_error(caught)
    raise_first(mesh, error)
    return lock


def conclude(
    world,
    mesh,
    lock: RunLock | None,
    output: Path | None,
    *,
    code: int,
    reason: str,
    step,
    roll=None,
) -> None:
    """Tell the user and the scripts how the run ended, then leave together."""
    from albert_ds.runtime.launch import leave_world

    if roll is not None:
        roll.close()
    rank, local_rank = (world.rank, world.local_rank) if world else (0, 0)
    if rank == 0 and output is not None and os.path.isdir(output) and (lock or _is_free(output)):
        try:
            write_exit(output, code=code, reason=reason, step=step)
        except OSError as error:  # the very disk that ended the run, say; a script sees a crash
            say(f"{output / 'exit.json'}: {error.strerror}")
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


def name_failure(error: RuntimeError | OSError, roll=None) -> tuple[int, str]:
    """Exit code and line for what the machine does to a run; raises any other error again."""
    if isinstance(error, OSError):
        named = name_os_error(error)
        return named.code, str(named)
    return name_lost_peer(error, roll)


def name_os_error(error: OSError) -> UserError | MachineFailed:
    """The ending for a file that cannot be read or written; raises any other error again."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in WRONG_PATH:
        return UserError(f"{where}{error.strerror}")
    if error.errno in STORAGE_GONE:
        return MachineFailed(f"{where}{error.strerror}; saved checkpoints are untouched")
    raise error


def name_lost_peer(error: RuntimeError, roll=None) -> tuple[int, str]:
    """Exit code and line for a collective that failed because a peer has gone.

    Raises the error again where it is anything else: that is a crash of ours.
    """
    if not any(text in str(error) for text in PEER_LOST):
        raise error
    who = (roll and roll.name_missing()) or "a peer"
    what = str(error).splitlines()[0][:160]
    return MachineFailed.code, f"{who} is missing ({what}); saved checkpoints are untouched"


def end_hung_run(world, output: Path, reason: str) -> None:
    """End this rank from a thread while its main thread waits for ever; never returns."""
    if world.rank == 0:
        write_exit(output, code=MachineFailed.code, reason=reason, step=None)
    if world.local_rank == 0:
        say(reason)
    os._exit(MachineFailed.code)
