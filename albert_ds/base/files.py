"""Write files so that nothing of the user's is lost.

A file is written beside its place and renamed: a reader finds the old content or the new one, never
a part. An output never is an input nor holds one. What stands where a command would write is
replaced or removed only if it is ours: a file that bears MARK, a folder with a file by which its
command knows it. All else is refused.
"""

import contextlib
import errno
import filecmp
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from albert_ds.base.errors import UserError, name_os_error

# It also holds ds_configs/ and slurm/: in a clone as links, in an installed package as copies.
PACKAGE = Path(__file__).parents[1]
UMASK = os.umask(0)  # it can only be read by setting it: here, before there are threads
os.umask(UMASK)
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # such file systems
MARK = "written by albert-ds"  # near the start of each report and picture
# What a trainer replaces in a RUN, and what says that the RUN is one.
RUN_NAMES = ("metrics.jsonl", "spiece.model", "tokenizer*.json", "results.json", "*.tsv", "best")
RUN_NAMES += ("outputs.*", "predictions.*", "nbest.*", "null_odds.*", "seed-*", "plugin.py")
RUN_MARKS = ("config.json", "checkpoints")


def write_file(
    path: Path, content: bytes | str, *, sync: bool = False, place: Callable = os.replace
) -> str:
    """Replace the file at `path` in one rename; returns the sha256 of what was written.

    `place` gives a file its name. `sync` also flushes the file to the disk before that. Raises
    OSError; then the old file is untouched and the partial one is removed.
    """
    content = content.encode() if isinstance(content, str) else content
    partial = name_partial(path)
    try:
        with open(partial, "xb") as file:  # never a file that is there, or that a link names
            file.write(content)
        if sync:
            sync_file(partial)
        place(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
    return hashlib.sha256(content).hexdigest()


def name_partial(path: Path) -> Path:
    """A name beside `path` that nobody else has: for what will be renamed to it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def write_json(path: Path, content: dict) -> None:
    """Replace the JSON file at `path`. Raises OSError."""
    write_file(path, json.dumps(content, indent=1) + "\n")


def write_report(path: Path, values: dict) -> None:
    """Write the JSON that a user has named, with MARK. Raises OSError."""
    write_output(path, json.dumps({"note": MARK, **values}, indent=1) + "\n")


def write_output(path: Path, content: bytes | str) -> None:
    """Write the file that a user has named, in place of none or of one with MARK. Raises OSError.

    It was checked before the work; another may have been put there since.
    """
    is_ours = path.is_file() and may_replace(path)
    write_file(path, content, place=os.replace if is_ours else place_new)


def place_new(source: Path, place: Path) -> None:
    """Rename a file to a name that no other has. Raises OSError: FileExistsError if one has it."""
    try:
        os.link(source, place)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place)) from None
        os.replace(source, place)
    else:
        source.unlink()


def may_replace(path: Path) -> bool:
    """True if there is no file at `path`, or one with MARK."""
    if not path.is_file():
        return not os.path.lexists(path)
    with path.open("rb") as file:
        return MARK.encode() in file.read(4096)


def refuse_input(output: Path, inputs: Iterable[Path | str]) -> None:
    """Raise UserError if `output` is one of `inputs`, or a folder that holds one."""
    place = Path(os.path.realpath(output))  # not resolve(), which raises for a loop of links
    for source in inputs:
        real = Path(os.path.realpath(source))
        if not real.exists():  # a URL
            continue
        if real == place or (output.exists() and output.samefile(real)):
            raise UserError(f"--output {output}: is the input {source}; name another one")
        if place in real.parents:
            raise UserError(f"--output {output}: holds the input {source}; name another folder")


def check_folder(
    output: Path,
    inputs: Iterable[Path | str] = (),
    *,
    names: Iterable[str] = ("*",),
    marks: Iterable[str] = (),
) -> None:
    """Raise UserError if a command may not write to the folder `output`, which need not exist.

    It may not be or hold an input, and may have none of `names` (patterns) that the command would
    write, unless one of `marks` in it says that it is the command's own.
    """
    if output.parts[:1] and output.parts[0].endswith(":"):  # Path makes one slash of two
        raise UserError(f"--output {output}: must be a folder, not a URL")
    refuse_input(output, inputs)
    place = Path(os.path.abspath(output))
    nearest = next(folder for folder in (place, *place.parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise UserError(f"--output {output}: {nearest} exists and is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):  # of a read-only disk too
        raise UserError(f"--output {output}: {nearest} may not be written to")
    if nearest != place:
        return
    for held in sorted(output.iterdir()):
        if held.exists() and not held.is_file() and not held.is_dir():
            raise UserError(f"--output {output}: {held.name} in it is neither file nor folder")
    if not any((output / mark).exists() for mark in marks):
        for held in (path for name in names for path in sorted(output.glob(name))):
            raise UserError(f"--output {output}: holds {held.name}; name another folder")


@contextmanager
def new_folder(output: Path) -> Generator[Path]:
    """A folder beside `output`, whose files go there when the block ends without an error.

    Other files of `output` stay. Raises UserError if a file would replace one with other content,
    or what `name_os_error` makes of an OSError; then `output` is as it was.
    """
    place = Path(os.path.abspath(output))  # `.` has no name
    if not place.name:
        raise UserError(f"--output {output}: must be a folder in another one")
    partial = name_partial(place)
    try:
        partial.mkdir(parents=True)
        yield partial
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        for path in files:
            open_to_readers(path)
        if place.exists():
            publish({path: place / path.relative_to(partial) for path in files})
        else:
            partial.rename(place)
    except OSError as error:
        name = str(error.filename or output).replace(str(partial), str(output))
        raise name_os_error(OSError(error.errno, error.strerror or str(error), name)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def open_to_readers(path: Path) -> None:
    """Give a file the mode of any new one: safetensors opens its files to their owner alone."""
    path.chmod(0o666 & ~UMASK)


def publish(places: dict[Path, Path]) -> None:
    """Move files to their places, in this order, on one file system.

    Raises UserError, before any is moved, if there is a file with other content; and OSError.
    """
    is_same: dict[Path, bool] = {}
    for path, place in places.items():
        is_same[place] = place.is_file() and filecmp.cmp(path, place, shallow=False)
        if os.path.lexists(place) and not is_same[place]:
            raise UserError(f"{place}: is there already and differs; name another --output")
    for path, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        (os.replace if is_same[place] else place_new)(path, place)


def sync_file(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compute_crc32(path: Path) -> int:
    """CRC-32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
