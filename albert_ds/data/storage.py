"""Files at a path, or at any URL that fsspec reads (http://, s3://, ...).

A request that fails or gets no answer is repeated, after pauses that double; a request for a
missing object is not. No location is ever run as a command.
"""

import asyncio
import glob
import io
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

from albert_ds.errors import DamagedData, UserError

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
        return [system.unstrip_protocol(name) for name in names if system.isfile(name)]
    except _failures() as error:
        raise UserError(f"--input {pattern}: cannot be listed: {_explain(error)}") from None


def open_file(location: str) -> IO[bytes]:
    """Open for reading; raises OSError or UserError."""
    if not is_url(location):
        return open(location, "rb")
    system, path = _find_system(location)
    # Some file systems return a file that can only read whole lines.
    return io.BufferedReader(system.open(path, "rb"), 1 << 20)


def look_up(location: str) -> Stored:
    """Size and time of change; raises OSError or UserError."""
    if not is_url(location):
        status = Path(location).stat()
        return Stored(status.st_size, str(status.st_mtime_ns))
    system, path = _find_system(location)
    info = system.info(path)
    marks = (info[name] for name in ("ETag", "LastModified", "mtime", "created") if info.get(name))
    return Stored(info.get("size") or 0, str(next(marks, "")))


def read_bytes(location: str) -> bytes:
    """The content of a file. Raises OSError, and DamagedData where all tries have failed."""
    if not is_url(location):
        return Path(location).read_bytes()
    import tenacity

    failed = tenacity.retry_if_exception_type(_failures())
    final = tenacity.retry_if_exception_type((FileNotFoundError, PermissionError))
    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(TRIES),
        wait=tenacity.wait_random_exponential(FIRST_PAUSE, LONGEST_PAUSE),
        retry=lambda state: failed(state) and not final(state),
        reraise=True,
    )
    try:
        return attempts(_read_url, location)
    except FileNotFoundError:
        raise
    except _failures() as error:
        raise DamagedData(
            f"{location}: cannot be read after {attempts.statistics['attempt_number']} tries: "
            f"{_explain(error)}"
        ) from None


def _read_url(location: str) -> bytes:
    system, path = _find_system(location)
    return system.cat_file(path)


def _find_system(location: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there.

    Never kept: a file system from before a fork does not work after it, and fsspec keeps track.
    """
    import fsspec

    options: dict[str, Any] = {}
    if location.startswith("http"):
        import aiohttp

        patience = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
        options["client_kwargs"] = {"timeout": patience}
    try:
        return fsspec.core.url_to_fs(location, **options)
    except (ValueError, ImportError) as error:
        raise UserError(f"{location}: {error}; allowed: a path or a URL of fsspec") from None


def _failures() -> tuple[type[Exception], ...]:
    """The errors of fsspec's file systems; those over HTTP also raise aiohttp's own."""
    import aiohttp

    return (OSError, asyncio.TimeoutError, aiohttp.ClientError)


def _explain(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
