"""A checkpoint on the disk: written whole, proven whole before it is read, deleted when it is old.

    RUN/checkpoints/step-00001000/weights.safetensors      fp32 weights
                                  exp_avg.safetensors      first moments
                                  exp_avg_sq.safetensors   second moments
                                  average.safetensors      averaged weights, with --average
                                  state.json               format, step, data position, checksums
    RUN/checkpoints/latest                                 name of the newest, for scripts
    RUN/checkpoints/best/                                  of fine-tuning: weights and state.json
    RUN/checkpoints/imported/                              of `albert-ds import`: the same two files

A folder gets its final name in one atomic rename after all its files have reached the disk, so a
folder with a final name is complete. `latest` is replaced after that, also by a rename. Nothing
here reads it to choose a checkpoint: `open_newest` looks at the folders themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from albert_ds.base.cli import log_line, non_negative
from albert_ds.base.errors import DamagedData, Diverged, MachineFailed, UserError
from albert_ds.base.files import compute_crc32, open_to_readers, sync_file, write_file
from albert_ds.base.json_files import check, parse_json
from albert_ds.checkpoint.run_folder import RunLock

if TYPE_CHECKING:
    from torch import Tensor

Shapes = dict[str, tuple[int, ...]]  # of every tensor of a model, by name
FORMAT = 1  # of state.json
WEIGHTS, STATE = "weights.safetensors", "state.json"
FILES = (WEIGHTS, "exp_avg.safetensors", "exp_avg_sq.safetensors")
AVERAGE = "average.safetensors"
BEST = Path("checkpoints", "best")  # of a fine-tuning run, as measured on the dev set
IMPORTED = Path("checkpoints", "imported")
FOLDER_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,9})", re.ASCII)
LATEST = "latest"
LEFT_OVER = re.compile(
    rf"\.{FOLDER_NAME.pattern}\.(tmp|old)|\.{LATEST}\.[0-9a-f]{{8}}\.partial", re.ASCII
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """What a resumed run needs besides the tensors."""

    step: int  # finished optimizer steps
    samples: int  # position in the data stream
    updates: int  # applied updates: steps without those skipped for a non-finite gradient
    loss_scale: dict | None  # state of fp16's dynamic loss scaler


SCHEMA = {
    "step": non_negative,
    "samples": non_negative,
    "updates": non_negative,
    "loss_scale": (dict, None),
}


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def write_checkpoint(
    output: Path,
    tensors: dict,
    state: TrainState,
    *,
    keep_last: int,
    keep_every: int | None,
    keep_step: int | None = None,
    lock: RunLock | None = None,
) -> None:
    """Write a checkpoint of `tensors` (by file and name), and delete what is older than those kept.

    Raises MachineFailed or Diverged.
    """
    root = output / "checkpoints"
    write_folder(root / folder_name(state.step), tensors, asdict(state), lock)
    try:
        write_file(root / LATEST, folder_name(state.step) + "\n", sync=True)
        sync_file(root)
        # A later one was found damaged, and counts for none.
        folders = [f for f in list_checkpoints(root) if step_of(f) <= state.step]
    except OSError as caught:
        raise _storage_failed(root, tensors, caught) from caught
    for folder in folders[keep_last:]:
        if step_of(folder) != keep_step and (keep_every is None or step_of(folder) % keep_every):
            try:
                for file in (STATE, *FILES, AVERAGE):
                    (folder / file).unlink(missing_ok=True)
                if not any(folder.iterdir()):  # the user may keep something in it
                    folder.rmdir()
            except OSError as error:
                log_line(f"{folder}: not deleted ({error})")


def write_folder(final: Path, tensors: dict, facts: dict, lock: RunLock | None = None) -> None:
    """Publish a folder with files of tensors and a state.json, completely or not at all.

    Raises Diverged if a number is not finite, and MachineFailed if the folder cannot be written,
    or if RUN at this path is no longer the one that `lock` holds.
    """
    from safetensors.torch import save_file

    root = final.parent
    for file, content in tensors.items():
        for name, tensor in content.items():
            if not tensor.isfinite().all():
                raise Diverged(
                    f"{name} in {file} of step {facts['step']} is not finite; "
                    f"{describe_saved(root.parent)}"
                )
    if lock is not None:
        lock.check()
    temporary, old = (final.with_name(f".{final.name}.{end}") for end in ("tmp", "old"))
    try:
        root.mkdir(exist_ok=True)  # never RUN itself: if that is gone, another one may follow
        for left_over in root.iterdir():  # of a run killed while saving
            if LEFT_OVER.fullmatch(left_over.name):
                shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        checksums = {}
        for file, content in tensors.items():
            save_file(content, temporary / file)
            open_to_readers(temporary / file)
            sync_file(temporary / file)
            checksums[file] = compute_crc32(temporary / file)
        record = {"format": FORMAT, **facts, "crc32": checksums}
        write_file(temporary / STATE, json.dumps(record, indent=1) + "\n", sync=True)
        sync_file(temporary)
        # The last best, or a damaged one of this step.
        if final.is_dir() and not final.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.replace(temporary, final)
        for path in old.iterdir() if old.is_dir() else ():
            if path.name not in (STATE, *FILES, AVERAGE):  # the user's
                os.rename(path, final / path.name)
        sync_file(root)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as caught:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _storage_failed(root, tensors, caught) from caught


def _storage_failed(root: Path, tensors: dict, caught: Exception) -> MachineFailed:
    needed = sum(t.numel() * 4 for content in tensors.values() for t in content.values())
    free = "unknown"
    kept = []
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(root if root.exists() else root.parent).free:,}"
        kept = [path.name for path in reversed(list_checkpoints(root))]
    return MachineFailed(
        f"could not save under {root} ({getattr(caught, 'strerror', None) or caught}): {needed:,} "
        f"bytes needed, {free} free; saved and untouched: {', '.join(kept) or 'nothing'}"
    )


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints in a folder, newest first. Raises OSError if it cannot be read.

    Only folders that have a name which `folder_name` gives count; what else lies there is not ours.
    """
    with os.scandir(root) as entries:
        folders = [
            root / entry.name
            for entry in entries
            if FOLDER_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return sorted(folders, key=step_of, reverse=True)


def list_kept(root: Path) -> list[Path]:
    """`list_checkpoints`, but for folders that --keep-last has emptied of all but the user's."""
    names = (STATE, *FILES)
    return [f for f in list_checkpoints(root) if any((f / name).exists() for name in names)]


def find_newest(output: Path, shapes: Shapes | None = None) -> tuple[Path | None, list[str]]:
    """The place of what `open_newest` opens, and its lines."""
    newest, damaged = open_newest(output, shapes)
    return newest.path if newest else None, damaged


def open_newest(output: Path, shapes: Shapes | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run, and one line for each newer one that is damaged.

    `shapes` are those of the model. None only where nothing was ever saved. Raises MachineFailed
    if one cannot be read, since it may be the newest whole one, UserError if a later version
    wrote one, and DamagedData if all are damaged.
    """
    root = output / "checkpoints"
    damaged = []
    try:
        if not _exists(root):
            return None, []
        for folder in list_checkpoints(root):
            checkpoint = Checkpoint(folder)
            problem = checkpoint.find_damage(shapes)
            if problem is None:
                return checkpoint, [f"{line}; using {folder.name}" for line in damaged]
            damaged.append(f"{folder}: {problem}")
        if not damaged and _exists(root / LATEST):
            named = (root / LATEST).read_text(errors="replace").strip()
            damaged = [f"{root / named} is gone"]
    except NotADirectoryError:
        raise UserError(f"{root}: is no folder; move it away") from None
    except OSError as error:
        raise MachineFailed(
            f"{error.filename or root}: {error.strerror or error}; make it readable, or move the "
            "checkpoint away to use an older one"
        ) from error
    if damaged:
        raise DamagedData(
            f"no checkpoint is whole: {'; '.join(damaged)}; move {root} away to start over"
        )
    return None, []


def _exists(path: Path) -> bool:
    """Like Path.exists, but raises OSError if the path may not be read."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


class Checkpoint:
    """A folder of tensors and its state.json, each file of which is mapped once.

    What `find_damage` has checked is what is read.
    """

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[str, safe_open] = {}

    @cached_property
    def record(self) -> dict:
        """The content of state.json. Raises UserError and OSError."""
        return parse_json((self.path / STATE).read_bytes(), STATE)

    @property
    def state(self) -> TrainState:
        return TrainState(**{field.name: self.record[field.name] for field in fields(TrainState)})

    def map(self, file: str) -> safe_open:
        """A file of tensors, to read them one by one. Raises OSError and SafetensorError."""
        if file not in self._files:
            self._files[file] = safe_open(self.path / file, framework="pt")
        return self._files[file]

    def read(self, file: str) -> dict[str, Tensor]:
        """All tensors of a file, in host memory. Raises OSError if it is damaged."""
        try:
            tensors = self.map(file)
            # Copied to where torch allocates: a CPU's products round as their operands are aligned.
            return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise OSError(f"{self.path / file}: {error}") from error

    def find_damage(self, shapes: Shapes | None) -> str | None:
        """What is wrong with the folder, None if nothing is.

        A `step-N` has all of FILES, and AVERAGE if state.json names it; any other folder the
        weights. The files must be those that were written, and hold one fp32 tensor for each of
        `shapes` (None: of its weights'). Raises OSError if a file exists and cannot be read, and
        UserError if a later version wrote it.
        """
        is_step = FOLDER_NAME.fullmatch(self.path.name)
        files = FILES if is_step else (WEIGHTS,)
        for file in (*files, STATE):
            if (problem := _find_missing(self.path / file)) is not None:
                return problem
        schema: dict[str, object] = {
            "step": non_negative,
            "crc32": dict.fromkeys(files, non_negative),
        }
        if is_step:
            schema |= {**SCHEMA, "step": step_of(self.path)}
        try:
            record = self.record
            check(record, {"format": non_negative}, STATE)
            if record["format"] == FORMAT:
                check(record, schema, STATE)
        except UserError as error:
            return f"{STATE} is damaged ({error})"
        if record["format"] != FORMAT:
            raise UserError(
                f"{self.path / STATE}: format {record['format']}; this version of albert-ds reads "
                f"format {FORMAT}: take the version that wrote it"
            )
        if is_step and AVERAGE in record["crc32"]:
            files = (*files, AVERAGE)
        for file in files:
            if (problem := _find_missing(self.path / file)) is not None:
                return problem
            if compute_crc32(self.path / file) != record["crc32"][file]:
                return f"{file} is damaged"
        return self._find_wrong_tensor(files, shapes)

    def _find_wrong_tensor(self, files: tuple[str, ...], shapes: Shapes | None) -> str | None:
        """The first tensor that is not one of fp32 in its shape (None: the first file's)."""
        for file in files:
            try:
                tensors = self.map(file)
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            except SafetensorError as error:
                return f"{file} is no file of tensors ({error})"
            stored = {name: tuple(piece.get_shape()) for name, piece in slices.items()}
            shapes = stored if shapes is None else shapes
            for name in sorted(shapes.keys() ^ stored.keys()):
                problem = "is missing" if name in shapes else "is no tensor of the model"
                return f"{file}: {name} {problem}"
            for name, piece in slices.items():
                if piece.get_dtype() != "F32":
                    return f"{file}: {name} is of type {piece.get_dtype()}, must be F32"
                if stored[name] != tuple(shapes[name]):
                    return f"{file}: {name} is {stored[name]}, must be {shapes[name]}"
        return None


def _find_missing(path: Path) -> str | None:
    if not _exists(path):
        return f"{path.name} is missing"
    if not stat.S_ISREG(os.stat(path).st_mode):
        return f"{path.name} is not a file"
    return None


def describe_saved(output: Path) -> str:
    """What is left to go on from, for the message of a run that ends badly."""
    try:
        newest, _ = find_newest(output)
    except (MachineFailed, DamagedData, UserError) as error:
        return f"last good checkpoint: none ({error})"
    return f"last good checkpoint: {newest or 'none'}"


def open_best(output: Path, shapes: Shapes) -> Checkpoint | None:
    """A fine-tuning run's best weights, proven whole.

    None if there are none yet. Raises DamagedData, and OSError if they cannot be read.
    """
    folder = output / BEST
    old = folder.with_name(f".{BEST.name}.old")
    if old.is_dir() and not _exists(folder):  # killed between the two renames of `write_folder`
        os.rename(old, folder)
    if not _exists(folder):
        return None
    best = Checkpoint(folder)
    problem = best.find_damage(shapes)
    if problem is not None:
        raise DamagedData(f"{folder}: {problem}; move {output} away to start over")
    return best
