"""Files at a path, or at any URL that fsspec reads (http://, s3://, ...).

A request that fails or gets no answer is repeated, after pauses that double; a request for a
missing object is not. No location is ever run as a command.
"""

import errno
import glob
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import fsspec
import tenacity

from albert_ds.cli import require
from albert_ds.errors import DamagedData, MachineFailed, UserError

T = TypeVar("T")
TRIES = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PATIENCE = 60.0  # seconds without an answer after which a request has failed


class FileInfo(NamedTuple):
    """Size and time of a stored file: if either differs, its content has changed."""

    size: int  # bytes
    modified: str


def is_url(location: str) -> bool:
    return "://" in location


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def find_files(patterns: Iterable[str]) -> list[str]:
    """The files that match the patterns (`**` descends), sorted, each once."""
    found: set[str] = set()
    for pattern in patterns:
        if is_url(pattern):
            matches = _match_urls(pattern)
        else:
            names = [pattern, *glob.glob(pattern, recursive=True)]  # a name may look like a pattern
            matches = [str(Path(name)) for name in names if Path(name).is_file()]
        if not matches:
            in_folder = not is_url(pattern) and Path(pattern).is_dir()
            hint = f"; for the files in this folder: '{pattern}/**'" if in_folder else ""
            raise UserError(f"--input {pattern}: matches no file{hint}")
        found.update(matches)
    return sorted(found)


def _match_urls(pattern: str) -> list[str]:
    def find(system: Any, path: str) -> list[str]:
        found = (
            system.glob(path, detail=True) if glob.has_magic(path) else {path: system.info(path)}
        )
        return [system.unstrip_protocol(p) for p, info in found.items() if info["type"] == "file"]

    try:
        return with_retries(pattern, find)
    except FileNotFoundError:
        return []


def open_file(location: str) -> IO[bytes]:
    """Open for reading; of a URL a whole copy, in a temporary file that goes when it is closed.

    Raises OSError, UserError, DamagedData if all tries have failed, MachineFailed if the copy has
    no space.
    """
    if not is_url(location):
        return open(location, "rb")
    copy = tempfile.NamedTemporaryFile()  # noqa: SIM115
    try:
        with_retries(location, lambda system, path: system.get_file(path, copy.name))
    except BaseException:
        copy.close()
        raise
    return copy


def stat(location: str) -> FileInfo:
    """Size and time of change; raises OSError, UserError or DamagedData."""
    if not is_url(location):
        status = Path(location).stat()
        return FileInfo(status.st_size, str(status.st_mtime_ns))
    info = with_retries(location, lambda system, path: system.info(path))
    marks = (info[name] for name in ("ETag", "LastModified", "mtime", "created") if info.get(name))
    return FileInfo(info.get("size") or 0, str(next(marks, "")))


def read_bytes(location: str, limit: int) -> bytes:
    """The content of a file, at most `limit` bytes: a wrong file may be of any size.

    Raises OSError, UserError for what is no file, DamagedData if all tries have failed.
    """
    if is_url(location):  # not every server heeds the range
        return with_retries(location, lambda system, path: system.cat_file(path, 0, limit)[:limit])
    if Path(location).exists() and not Path(location).is_file():
        raise UserError(f"{location}: not a file")
    with open(location, "rb") as file:
        return file.read(min(limit, os.fstat(file.fileno()).st_size))


def with_retries(location: str, request: Callable[[Any, str], T]) -> T:
    """What `request` gives in the end, of the file system of a URL and the path in it.

    Raises FileNotFoundError, UserError for what is no URL, DamagedData if all tries have failed,
    MachineFailed if this machine has no space.
    """
    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(TRIES),
        wait=tenacity.wait_random_exponential(FIRST_PAUSE, LONGEST_PAUSE),
        retry=tenacity.retry_if_exception(_may_pass),
        reraise=True,
    )
    try:
        return attempts(lambda: request(*_find_system(location)))
    except (UserError, MachineFailed):
        raise
    except ValueError as error:
        raise UserError(f"{location}: not a URL: {_explain(error)}") from None
    except Exception as error:  # every file system has errors of its own
        if isinstance(error, FileNotFoundError) and not _may_pass(error):
            raise
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise MachineFailed(
                f"{location}: no copy in {tempfile.gettempdir()}: {error.strerror}; the variable "
                "TMPDIR names another folder"
            ) from None
        raise DamagedData(
            f"{location}: cannot be read after {attempts.statistics['attempt_number']} tries: "
            f"{_explain(error)}"
        ) from None


def _find_system(location: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there.

    Never kept: a file system from before a fork does not work after it, and fsspec keeps track.
    """
    if "::" in location:  # to fsspec this is a chain of file systems, with options of each
        raise UserError(f"{location}: must be one URL, without ::")
    if location.startswith("s3:"):
        require("s3fs", "s3", location)
    options: dict[str, Any] = {}
    if location.startswith("http"):
        import aiohttp  # which takes longer than all else here

        patience = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
        options["client_kwargs"] = {"timeout": patience}
    try:
        return fsspec.core.url_to_fs(location, **options)
    except (ValueError, ImportError) as error:
        raise UserError(f"{location}: {error}; allowed: a path or a URL of fsspec") from None


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        # To fsspec every failure to look up a size over HTTP is a missing file.
        error = error.__cause__
        return not isinstance(error, ValueError) and getattr(error, "status", 500) >= 500
    is_final = isinstance(error, FileNotFoundError | PermissionError | ValueError)
    has_no_space = isinstance(error, OSError) and error.errno in NO_SPACE
    return isinstance(error, Exception) and not is_final and not has_no_space


def _explain(error: BaseException) -> str:
    error = error.__cause__ or error
    return " ".join(str(error).split())[:200] or type(error).__name__
