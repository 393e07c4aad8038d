"""Files at a path, or at any URL that fsspec reads (http://, s3://, ...).

A request that fails or gets no answer is repeated, after pauses that double; a request for a
missing object is not. No location is ever run as a command.
"""

import errno
import glob
import io
import itertools
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import fsspec
import tenacity

from albert_ds.base.cli import require
from albert_ds.base.errors import DamagedData, MachineFailed, UserError
from albert_ds.base.json_files import read_json

T = TypeVar("T")
BUFFER_BYTES = 1 << 16  # of a file that is read through
TRIES = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MIN_SPEED = 1000  # bytes a second, on average, once PATIENCE is over
BUSY = (408, 425, 429)  # what a server answers that may give another answer later
PATIENCE = 60.0  # seconds without an answer after which a request has failed


class FileInfo(NamedTuple):
    """Size and time of a stored file: if either differs, its content has changed."""

    size: int  # bytes
    modified: str


def is_url(location: str) -> bool:
    return "://" in location


def join(folder: str, name: str) -> str:
    """The location of a file in a folder. A query of a URL, which may sign it, stays at the end."""
    path, query = split_query(folder)
    return f"{path.rstrip('/')}/{name}{query}"


def beside(location: str, name: str) -> str:
    """The location of another file in the folder of this one."""
    path, query = split_query(location)
    return join((path.rpartition("/")[0] or ".") + query, name)


def split_query(location: str) -> tuple[str, str]:
    """A location without the query of a URL, and that query with its mark."""
    path, mark, query = location.partition("?") if is_url(location) else (location, "", "")
    return path, mark + query


def find_files(
    patterns: Iterable[str], flag: str = "--input", left_out: Counter[str] | None = None
) -> list[str]:
    """The files of paths, folders and globs (`**` descends), sorted, each once.

    A folder stands for all files in it and below that are not hidden, and one that `datasets` has
    saved for its data; `left_out` counts the others. Raises UserError for a pattern that no file
    matches, and for what can be no text: a broken link, a FIFO, a folder that may not be read.
    """
    files: dict[str, str] = {}
    for pattern in patterns:
        if is_url(pattern):
            matches = _match_urls(pattern)
        else:
            paths = _match_paths(pattern, flag, Counter() if left_out is None else left_out)
            matches = sorted(map(str, paths), key=lambda name: (len(name), name))
        if not matches:
            raise UserError(f"{flag} {pattern}: matches no file")
        for match in matches:
            files.setdefault(match if is_url(match) else os.path.realpath(match), match)
    return sorted(files.values())


def refuse_within(output: Path, patterns: Iterable[str], flag: str = "--input") -> None:
    """Raise UserError if the next reading of `patterns` would take a file of `output` for text."""
    place = Path(os.path.abspath(output))
    for pattern in (pattern for pattern in patterns if not is_url(pattern)):
        parts = Path(pattern).parts
        fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts))
        is_deep = Path(pattern).is_dir() or "**" in parts
        folder = os.path.realpath(pattern if Path(pattern).is_dir() else fixed)
        is_below = Path(folder) in (real := Path(os.path.realpath(output)), *real.parents)
        names = ("index.json", "spiece.model", "train-000000.tar")
        is_match = any((place / name).match(os.path.abspath(pattern)) for name in names)
        if is_match or (is_deep and is_below):
            raise UserError(f"--output {output}: is in {flag} {pattern}; name a folder outside it")


def _match_paths(pattern: str, flag: str, left_out: Counter[str]) -> Iterator[Path]:
    if Path(pattern).is_file():  # a name may look like a pattern
        yield Path(pattern)
        if glob.has_magic(pattern):
            yield from _check_paths(map(Path, glob.glob(pattern, recursive=True)), flag, left_out)
    elif Path(pattern).is_dir():
        yield from _check_paths(_walk(Path(pattern), set(), left_out), flag, left_out)
    else:
        # Of a path without a pattern glob drops what does not exist, so also broken links.
        matches = glob.glob(pattern, recursive=True) or [pattern] * os.path.lexists(pattern)
        yield from _check_paths(map(Path, matches), flag, left_out)


def _walk(folder: Path, seen: set[str], left_out: Counter[str]) -> Iterator[Path]:
    """All in a folder and below, also through links; of a folder that comes again, nothing."""
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            left_out["left out: hidden files and folders"] += 1
        elif path.is_dir():
            yield from _walk(path, seen, left_out)
        else:
            yield path


def _check_paths(paths: Iterable[Path], flag: str, left_out: Counter[str]) -> Iterator[Path]:
    """The files of text. Raises UserError, naming it, for what is neither file nor folder."""
    for path in paths:
        real = Path(os.path.realpath(path.parent)) / path.name  # links may go round
        if not real.exists():
            what = "a link to nothing"
        elif real.is_dir():
            what = "" if os.access(real, os.R_OK | os.X_OK) else "not to be read"
        elif not real.is_file():
            what = "no file"
        else:
            what = ""
            if _is_data(path):
                yield path
            else:
                left_out["left out: files that `datasets` saves beside its data"] += 1
        if what:
            raise UserError(f"{flag} {path}: is {what}; take it away, or name the files of text")


def _is_data(path: Path) -> bool:
    """False for what `save_to_disk` of the library datasets writes beside the data."""
    state = path.with_name("state.json")
    if not state.is_file() or not path.with_name("dataset_info.json").is_file():
        return path.name != "dataset_dict.json"
    listed = read_json(state).get("_data_files")
    return not isinstance(listed, list) or {"filename": path.name} in listed


def _match_urls(pattern: str) -> list[str]:
    def find(system: Any, path: str) -> list[str]:
        if pattern.startswith("hf://datasets/"):
            path = _pin_revision(system, path)
        entries = glob.has_magic(path) and system.glob(path, detail=True)
        if not entries:  # a name may look like a pattern
            entries = {path: system.info(path)}
            if entries[path]["type"] == "directory":
                entries = system.find(path, detail=True)
        files = (name for name, about in entries.items() if about["type"] == "file")
        return [system.unstrip_protocol(name) for name in files]

    try:
        return with_retries(pattern, find)
    except FileNotFoundError:
        return []


def _pin_revision(system: Any, path: str) -> str:
    """A path in a repository of the hub, at the commit that its branch is at now."""
    from huggingface_hub import HfApi

    place = system.resolve_path(path)
    hub = HfApi(endpoint=system.endpoint, token=system.token)
    about = hub.repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision)
    return type(place)(place.repo_type, place.repo_id, about.sha, place.path_in_repo).unresolve()


def open_file(location: str) -> IO[bytes]:
    """Open for reading; of a URL a whole copy, in a temporary file that goes when it is closed.

    Raises OSError, UserError, DamagedData if all tries have failed, MachineFailed if the copy has
    no space.
    """
    if not is_url(location):
        return open(location, "rb", BUFFER_BYTES)
    copy = tempfile.NamedTemporaryFile(buffering=BUFFER_BYTES)
    try:
        size = stat(location).size

        def request(system: Any, path: str) -> None:
            system.get_file(path, copy.name, callback=_Watch(size))
            if size and os.path.getsize(copy.name) != size:
                raise OSError(f"{os.path.getsize(copy.name):,} of {size:,} bytes came")

        with_retries(location, request)
    except BaseException:
        copy.close()
        raise
    return copy


def open_parts(location: str) -> Any:
    """Open for reading here and there; of a URL only the bytes that are asked for are loaded.

    Raises what `open_file` raises, when it is opened or read.
    """
    return _Parts(location) if is_url(location) else open(location, "rb")


class _Watch(fsspec.callbacks.Callback):
    """Ends a download that is too slow to be one, or longer than the file. Raises OSError."""

    def __init__(self, size: float):
        super().__init__()
        self._limit = size or math.inf
        self._started = time.monotonic()
        self._bytes = 0

    def relative_update(self, inc: int = 1) -> None:
        self._bytes += inc
        seconds = time.monotonic() - self._started
        if seconds > PATIENCE and self._bytes < MIN_SPEED * seconds:
            raise OSError(f"under {MIN_SPEED:,} bytes a second came in {seconds:.0f} s")
        if self._bytes > self._limit:
            raise OSError(f"more came than its {self._limit:,} bytes")


class _Full(Exception):
    """As much came as was asked for, and more is to come."""


class _Sink(io.BytesIO):
    """Takes at most `limit` bytes; then it raises _Full."""

    def __init__(self, limit: int):
        super().__init__()
        self._limit = limit
        self._watch = _Watch(math.inf)

    def write(self, chunk) -> int:
        self._watch.relative_update(len(chunk))
        super().write(chunk[: self._limit - self.tell()])
        if len(chunk) and self._limit < self._watch._bytes:
            raise _Full
        return len(chunk)


class _Parts(io.RawIOBase):
    def __init__(self, location: str):
        self._location = location
        self._size = stat(location).size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer) -> int:
        begin = self._at
        end = min(self._at + len(buffer), self._size)
        if begin >= end:
            return 0
        content = with_retries(self._location, partial(_read_range, begin=begin, end=end))
        if len(content) != end - begin:
            raise DamagedData(f"{self._location}: its server sends no parts of files: download it")
        buffer[: len(content)] = content
        self._at = end
        return len(content)


def _read_range(system: Any, path: str, *, begin: int, end: int) -> bytes:
    if "http" in system.protocol:  # whose server may send all of the file, or never end
        sink = _Sink(end - begin)
        try:
            system.get_file(path, sink, headers={"Range": f"bytes={begin}-{end - 1}"})
        except _Full:
            if begin:
                return b""
        return sink.getvalue()
    # That of the hub reads 5 MB ahead.
    options = {"cache_type": "none"} if system.protocol == "hf" else {}
    return system.cat_file(path, begin, end, **options)


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
        return with_retries(location, partial(_read_range, begin=0, end=limit))[:limit]
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
        if not _may_pass(error) and (status := _find_status(error)) not in (None, 404, 410):
            what = f"answers {status}" if status else "redirects it without end"
            raise UserError(f"{location}: its server {what}") from None
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
    for protocol, package, extra in (("s3:", "s3fs", "s3"), ("hf:", "huggingface_hub", "hf")):
        if location.startswith(protocol):
            require(package, extra, location)
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
    if (status := _find_status(error)) is not None:
        return status >= 500 or status in BUSY
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        # To fsspec every failure to look up a size over HTTP is a missing file.
        return not isinstance(error.__cause__, ValueError)
    is_final = isinstance(error, FileNotFoundError | PermissionError | ValueError)
    has_no_space = isinstance(error, OSError) and error.errno in NO_SPACE
    return isinstance(error, Exception) and not is_final and not has_no_space


def _find_status(error: BaseException) -> int | None:
    """What the server answered, where the error is of one; 0: only redirections."""
    error = error.__cause__ or error
    answer = getattr(error, "response", None)  # of the hub
    return getattr(answer, "status_code", getattr(error, "status", None))


def _explain(error: BaseException) -> str:
    error = error.__cause__ or error
    return " ".join(str(error).split())[:200] or type(error).__name__
