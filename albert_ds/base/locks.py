"""Exclusive ownership of a folder, by a file in it.

The kernel's lock ends with its owner. Some shared file systems have none (Lustre without
`-o flock`, NFS without lockd); there the owner makes a second file, which cannot be made twice, and
touches it while it lives.
"""

import atexit
import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import threading
import time
from pathlib import Path

from albert_ds.base.cli import log_line

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
BEAT = 10.0  # seconds between two touches of a live owner's file
SILENT = 3  # beats after which an owner is dead


class FileLock:
    """The lock of the file at `path`, which is made if it is missing; never through a link.

    Raises BlockingIOError, whose text names the owner, if another process has it; and OSError.
    """

    def __init__(self, path: Path):
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o666), "r+")
        self._claim: Claim | None = None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().strip()
            self._file.close()
            if error.errno not in NO_LOCKS:
                raise OSError(error.errno, owner or "another process", str(path)) from None
            self._claim = Claim(path.with_name(f"{path.name}.owner"))
            self._file = open(path, "r+")  # noqa: SIM115 (as long as the lock)
            log_line(f"{path}: {error.strerror} (flock); owned by {self._claim.path.name} instead")
        # A loader's worker would hold the lock for seconds after a killed trainer.
        os.register_at_fork(after_in_child=self._file.close)
        self._file.truncate(0)
        self._file.write(describe_process())
        self._file.flush()

    def is_held(self) -> bool:
        """Whether `path` still names the file that was locked. Raises OSError."""
        there = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        return there and (self._claim is None or self._claim.is_held())

    def release(self) -> None:
        self._file.close()
        if self._claim is not None:
            self._claim.release()


class Claim:
    """A file that one process makes and touches. Raises BlockingIOError if its owner lives."""

    def __init__(self, path: Path):
        self.path = path
        self._text = f"{describe_process()} {secrets.token_hex(8)}"
        self._pid = os.getpid()
        _take(path, self._text)
        self._ended = threading.Event()
        threading.Thread(target=self._touch, daemon=True).start()
        atexit.register(self.release)

    def is_held(self) -> bool:
        return self.path.read_text() == self._text

    def release(self) -> None:
        if os.getpid() != self._pid:  # a forked process, which owns nothing
            return
        self._ended.set()
        with contextlib.suppress(FileNotFoundError):  # the whole folder is gone
            if self.is_held():
                self.path.unlink()

    def _touch(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _take(path: Path, text: str) -> None:
    """Write `text` to the file, which is made, or is a dead owner's. Raises BlockingIOError.

    Of many that find a dead owner one may replace its file: the owner of a second file, which is
    named after what the first one says, and is taken in the same way.
    """
    while True:
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(text)
            return
        with contextlib.suppress(FileNotFoundError):  # another was faster, or its owner lived
            dead = _read_dead(path)
            heir = path.with_name(f"{path.name}.{hashlib.sha256(dead.encode()).hexdigest()[:8]}")
            _take(heir, text)
            try:
                if path.read_text() == dead:
                    heir.replace(path)
                    return
            finally:
                heir.unlink(missing_ok=True)


def _read_dead(path: Path) -> str:
    """What a dead owner wrote. Raises BlockingIOError if it lives, FileNotFoundError if none is."""
    text = path.read_text()
    touched = path.stat().st_mtime_ns
    owner = text.rpartition(" ")[0]
    until = time.monotonic() + SILENT * BEAT
    while not is_dead(owner):
        is_over = time.monotonic() > until
        if path.stat().st_mtime_ns != touched:  # clocks of machines differ
            raise BlockingIOError(errno.EAGAIN, owner or "another process", str(path))
        if is_over:
            break
        time.sleep(BEAT / 10)
    return text


def describe_process() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}"


def is_dead(owner: str) -> bool:
    """Whether a process that `describe_process` has described ran on this machine and has ended."""
    word, _, rest = owner.partition(" ")
    pid, _, node = rest.partition(" on ")
    if word != "process" or node != os.uname().nodename or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
