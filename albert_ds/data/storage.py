"""Files at a path, or at any URL that fsspec reads (http://, s3://, ...).

A request that fails or gets no answer is repeated, after pauses that double, and an answer that is
cut short is read on from there; a request for a missing object is not repeated. No location is ever
run as a command.
"""

import asyncio
import glob
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from albert_ds.cli import require
from albert_ds.errors import DamagedData, UserError

T = TypeVar("T")
TRIES = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
PATIENCE = 60.0  # seconds without an answer after which a request has failed


class Stored(NamedTuple):
    """Size and time of a stored file: where either differs, its content has changed."""

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
        matches = _match_urls(pattern) if is_url(pattern) else _match_paths(pattern)
        if not matches:
            in_folder = not is_url(pattern) and Path(pattern).is_dir()
            hint = f"; for the files in this folder: '{pattern}/**'" if in_folder else ""
            raise UserError(f"--input {pattern}: matches no file{hint}")
        found.update(matches)
    return sorted(found)


def _match_paths(pattern: str) -> list[str]:
    names = [pattern, *glob.glob(pattern, recursive=True)]  # a name may look like a pattern
    return [str(Path(name)) for name in names if Path(name).is_file()]


def _match_urls(pattern: str) -> list[str]:
    system, path = _find_system(pattern)
    try:
        names = system.glob(path) if glob.has_magic(path) else [path]
        return [url for url in map(system.unstrip_protocol, names) if _is_file(url)]
    except (*_failures(), ValueError) as error:
        raise UserError(f"--input {pattern}: cannot be listed: {_explain(error)}") from None


def _is_file(url: str) -> bool:
    try:
        return _repeated(url, _read_info)["type"] == "file"
    except FileNotFoundError:
        return False


def open_file(location: str) -> IO[bytes]:
    """Open for reading; raises OSError or UserError."""
    if not is_url(location):
        return open(location, "rb")
    return io.BufferedReader(_RemoteFile(location), 1 << 20)


def look_up(location: str) -> Stored:
    """Size and time of change; raises OSError, UserError or DamagedData."""
    if not is_url(location):
        status = Path(location).stat()
        return Stored(status.st_size, str(status.st_mtime_ns))
    info = _repeated(location, _read_info)
    marks = (info[name] for name in ("ETag", "LastModified", "mtime", "created") if info.get(name))
    return Stored(info.get("size") or 0, str(next(marks, "")))


def read_bytes(location: str, limit: int) -> bytes:
    """The content of a file, at most `limit` bytes: a wrong file may be of any size.

    Raises OSError, UserError for what is no file, DamagedData where all tries have failed.
    """
    if is_url(location):
        return _repeated(location, lambda url: _read_url(url, limit))
    if Path(location).exists() and not Path(location).is_file():
        raise UserError(f"{location}: not a file")
    with open(location, "rb") as file:
        return file.read(min(limit, os.fstat(file.fileno()).st_size))


def _repeated(location: str, request: Callable[[str], T]) -> T:
    """What a request gives in the end. Raises DamagedData where all tries have failed."""
    import tenacity

    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(TRIES),
        wait=tenacity.wait_random_exponential(FIRST_PAUSE, LONGEST_PAUSE),
        retry=tenacity.retry_if_exception(_may_pass),
        reraise=True,
    )
    try:
        return attempts(request, location)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{location}: not a URL: {_explain(error)}") from None
    except _failures() as error:
        if isinstance(error, FileNotFoundError) and not _may_pass(error):
            raise
        raise DamagedData(
            f"{location}: cannot be read after {attempts.statistics['attempt_number']} tries: "
            f"{_explain(error)}"
        ) from None


def _read_url(location: str, limit: int) -> bytes:
    system, path = _find_system(location)
    return system.cat_file(path, start=0, end=limit)[:limit]  # not every server heeds the range


def _read_info(location: str) -> dict:
    system, path = _find_system(location)
    return system.info(path)


class _RemoteFile(io.RawIOBase):
    """A file behind a URL, read from its beginning; where that fails, it is read on from there.

    Raises OSError or UserError where it cannot be opened, DamagedData where all tries have failed.
    """

    def __init__(self, location: str):
        self._location = location
        self._at = 0
        self._options: dict[str, int] = {}
        self._file: Any = _repeated(location, self._open)
        self._size: int | None = getattr(self._file, "size", None)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        content = _repeated(self._location, lambda _: self._read(len(buffer)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def _read(self, size: int) -> bytes:
        try:
            if self._file is None:
                self._file = self._open(self._location)
            content = self._file.read(size)
        except ValueError:  # a server of whole files only
            if self._options:
                raise
            self._file, self._options = None, {"block_size": 0}
            return self._read(size)
        except _failures():
            self._file = None
            raise
        if not content and self._size is not None and self._at < self._size:
            self._file = None
            raise OSError(f"it ends after {self._at} of its {self._size} bytes")
        return content

    def _open(self, location: str) -> Any:
        """Opened where the next byte to read is."""
        system, path = _find_system(location)
        file = system.open(path, "rb", **self._options)
        if not self._options:
            file.seek(self._at)
        left = self._at if self._options else 0
        while left and (content := file.read(min(left, 1 << 20))):
            left -= len(content)
        return file


def _find_system(location: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there.

    Never kept: a file system from before a fork does not work after it, and fsspec keeps track.
    """
    import fsspec

    if "::" in location:  # to fsspec this is a chain of file systems, with options of each
        raise UserError(f"{location}: must be one URL, without ::")
    if location.startswith("s3:"):
        require("s3fs", "s3", location)
    options: dict[str, Any] = {}
    if location.startswith("http"):
        import aiohttp

        patience = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
        options["client_kwargs"] = {"timeout": patience}
    try:
        return fsspec.core.url_to_fs(location, **options)
    except (ValueError, ImportError) as error:
        raise UserError(f"{location}: {error}; allowed: a path or a URL of fsspec") from None


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, _failures()):
        # To fsspec every failure to look up a size over HTTP is a missing file.
        return getattr(error.__cause__, "status", 500) >= 500
    is_final = isinstance(error, FileNotFoundError | PermissionError)
    return isinstance(error, _failures()) and not is_final


def _failures() -> tuple[type[Exception], ...]:
    """The errors of fsspec's file systems; those over HTTP also raise aiohttp's own."""
    import aiohttp

    return (OSError, asyncio.TimeoutError, aiohttp.ClientError)


def _explain(error: BaseException) -> str:
    error = error.__cause__ or error
    return " ".join(str(error).split())[:200] or type(error).__name__
