"""The folder of an unfinished build, OUTPUT/building, and who may work in it.

A build owns the folder until it ends. A part of a build (`--piece I/N`, `--join I/M`) owns it only
while it looks at the text, and then a lock of its own, so that parts work at the same time, also on
several machines. Whoever is killed leaves its finished work; nobody deletes another's.
"""

import argparse
import contextlib
import errno
import re
import shutil
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from albert_ds.base.cli import log_line
from albert_ds.base.errors import ENDINGS, UserError, name_os_error
from albert_ds.base.files import check_folder
from albert_ds.base.locks import FileLock
from albert_ds.data.shards import INDEX_NAME

WORK_NAME, LOCK_NAME = "building", ".albert-ds.lock"
MAX_PARTS = 100_000
POLL_SECONDS = 0.2


class Part(NamedTuple):
    """Every `of`-th item, from the `number`-th on."""

    number: int  # from 1
    of: int

    @classmethod
    def read(cls, text: str) -> "Part":
        """Read I/N. Raises ArgumentTypeError."""
        numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
        part = cls(*map(int, numbers.groups())) if numbers else cls(0, 0)
        if not 1 <= part.number <= part.of <= MAX_PARTS:
            raise argparse.ArgumentTypeError(
                f"{text}: must be I/N, two whole numbers with 1 <= I <= N <= {MAX_PARTS:,}"
            )
        return part

    def of_items(self, items: list) -> list:
        return items[self.number - 1 :: self.of]

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@contextmanager
def work_folder(output: Path, locations: list[str]) -> Generator[Path]:
    """Own the folder of unfinished work in `output`. It is kept if a build can be resumed.

    Raises UserError if another process works in it, or if `output` holds anything but a killed
    build.
    """
    is_new = not output.exists()
    work, lock = _claim(output, locations, waits=False)
    try:
        if at_work := next(_parts_at_work(work), None):
            raise UserError(f"--output {output}: {at_work} is at work in it")
        with _name_full_disk(output):
            yield work
    except ENDINGS:
        _delete_if_useless(output, work, is_new)
        raise
    else:
        try:
            shutil.rmtree(work)
        except OSError as error:  # what was built is whole
            log_line(f"{work}: not deleted ({error.strerror}); nothing needs it any more")
    finally:
        lock.release()


@contextmanager
def part_folder(output: Path, locations: list[str]) -> Generator[Path]:
    """Own the folder as `work_folder` does, but wait for it and leave it for other parts."""
    is_new = not output.exists()
    work, lock = _claim(output, locations, waits=True)
    try:
        with _name_full_disk(output):
            yield work
    except ENDINGS:
        _delete_if_useless(output, work, is_new)
        raise
    finally:
        lock.release()


@contextmanager
def part_lock(output: Path, work: Path, step: str, part: Part) -> Generator[None]:
    """Own one part. Raises UserError if a process has it, or a part of another number does."""
    for path, owner in _locks_at_work(work):
        name, number, of = _name_part(path)
        if name == step and (of != part.of or number == part.number):
            raise UserError(
                f"--{step} {part}: --{step} {number}/{of} is at work in {output} ({owner})"
            )
    lock = FileLock(work / f"{step}-{part.number}-of-{part.of}.lock")
    try:
        with _name_full_disk(output):
            yield
    finally:
        lock.release()


def list_parts(work: Path, step: str) -> set[Part]:
    """The parts that have been started."""
    parts = map(_name_part, work.glob(f"{step}-*-of-*.lock"))
    return {Part(number, of) for _, number, of in parts}


def _claim(output: Path, locations: list[str], *, waits: bool) -> tuple[Path, FileLock]:
    """Make the folders and lock them."""
    work = output / WORK_NAME
    has_waited = False
    while True:
        if (output / INDEX_NAME).exists():
            if (work / LOCK_NAME).exists():
                shutil.rmtree(work)  # of a build that was killed at its very end
            raise UserError(
                f"--output {output}: holds a built data set already; name another folder"
            )
        with contextlib.suppress(OSError):
            work.rmdir()  # empty, of a build that ended before it had a lock
        check_folder(output, locations, marks=[f"{WORK_NAME}/{LOCK_NAME}"])
        try:
            work.mkdir(parents=True, exist_ok=True)
            lock = FileLock(work / LOCK_NAME)
            with contextlib.suppress(FileNotFoundError):  # deleted by the owner before
                if lock.is_held():
                    return work, lock
            lock.release()
        except FileNotFoundError:  # another has deleted the folder, which was empty
            pass
        except BlockingIOError as error:
            if not waits:
                raise UserError(f"--output {output}: another build is writing to it") from None
            if not has_waited:
                log_line(f"{output}: waiting for {error.strerror}")
            has_waited = True
            time.sleep(POLL_SECONDS)
        except OSError as error:
            raise name_os_error(OSError(error.errno, error.strerror, str(output))) from None


def _locks_at_work(work: Path) -> Iterator[tuple[Path, str]]:
    """The locks of parts that are held, and by whom."""
    for path in sorted(work.glob("*-of-*.lock")):
        try:
            FileLock(path).release()
        except BlockingIOError as error:
            yield path, str(error.strerror)


def _parts_at_work(work: Path) -> Iterator[str]:
    for path, owner in _locks_at_work(work):
        step, number, of = _name_part(path)
        yield f"--{step} {number}/{of} ({owner})"


def _name_part(path: Path) -> tuple[str, int, int]:
    step, number, _, of = path.stem.split("-")
    return step, int(number), int(of)


def _delete_if_useless(output: Path, work: Path, is_new: bool) -> None:
    """Delete a folder in which there is nothing to resume and nobody at work."""
    if any(work.glob("*.run")) or any(_parts_at_work(work)):
        return
    shutil.rmtree(work)
    if is_new and not any(output.iterdir()):
        output.rmdir()


@contextmanager
def _name_full_disk(output: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        named = OSError(error.errno, error.strerror, str(output))
        kept = "; finished work is kept, and the same command continues"
        raise name_os_error(named, kept) from None
