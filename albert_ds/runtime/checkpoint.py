"""Layout-independent checkpoints: logical tensors by name, and one small JSON.

    RUN/checkpoints/step-00001000/weights.safetensors      fp32 weights
                                  exp_avg.safetensors      first moments
                                  exp_avg_sq.safetensors   second moments
                                  state.json               step, data position, checksums
    RUN/checkpoints/latest                                 name of the newest

Every layout writes whole tensors, and every layout reads them. Parameter sharing keeps them small:
12 bytes for each of 12 to 223 million parameters. Random numbers are a function of (seed, step,
rank) and the data position is one integer, so nothing else has to be saved.

A folder gets its final name in one atomic rename after all its files have reached the disk, so a
folder with a final name is complete. `latest` is replaced after that, also by a rename.

`Saver` writes while training goes on: training pauses while the tensors are gathered, then a thread
of rank 0 writes them. Writing, syncing and checksumming release Python's lock.
"""

import contextlib
import json
import os
import re
import shutil
import stat
import threading
import time
import zlib
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from albert_ds.cli import log_line
from albert_ds.errors import DamagedData, Diverged, MachineFailed
from albert_ds.files import compute_crc32, sync_file, write_file
from albert_ds.json_files import parse_json, read_json
from albert_ds.optim.zero import ParamFragment, set_step_count
from albert_ds.parallel.mesh import Mesh
from albert_ds.parallel.tensor import shard
from albert_ds.runtime.consensus import from_rank_0, raise_first_error
from albert_ds.runtime.ending import SAVER_THREAD
from albert_ds.runtime.engine import Engine

FILES = ("weights.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors")
FOLDER_NAME = re.compile(r"step-\d{8}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """What a resumed run needs besides the tensors."""

    step: int  # finished optimizer steps
    samples: int  # position in the data stream
    updates: int  # applied updates: steps without those skipped for a non-finite gradient
    loss_scale: dict | None  # state of fp16's dynamic loss scaler


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def save_checkpoint(
    output: Path,
    engine: Engine,
    state: TrainState,
    *,
    keep_last: int,
    keep_every: int | None = None,
) -> Path:
    """Write a complete checkpoint and delete old ones. Collective.

    The newest `keep_last` undamaged ones are kept, and every one whose step is a multiple of
    `keep_every`. Raises MachineFailed or Diverged on all ranks.
    """
    tensors = gather_all(engine)
    error = None
    if engine.mesh.rank == 0:
        error = write_checkpoint(output, tensors, state, keep_last=keep_last, keep_every=keep_every)
    raise_first_error(engine.mesh, error)
    return output / "checkpoints" / folder_name(state.step)


def gather_all(engine: Engine) -> dict[str, dict[str, Tensor]]:
    """All tensors of a checkpoint by file, in rank 0's host memory. Collective."""
    return {name: gather(engine, name) for name in FILES}


def write_checkpoint(
    output: Path, tensors: dict, state: TrainState, *, keep_last: int, keep_every: int | None
) -> MachineFailed | Diverged | None:
    """Write a checkpoint completely or not at all; returns the error if that failed.

    Tensors that are not finite are never written.
    """
    root = output / "checkpoints"
    for file, content in tensors.items():
        for name, tensor in content.items():
            if not tensor.isfinite().all():
                return Diverged(
                    f"{name} in {file} of step {state.step} is not finite; {describe_saved(output)}"
                )
    try:
        for left_over in root.glob(".step-*.tmp"):  # of a run killed while saving
            if left_over.is_dir() and not left_over.is_symlink():
                shutil.rmtree(left_over)
        _write(root, root / folder_name(state.step), tensors, state)
        _prune(root, keep_last, keep_every)
    except (OSError, SafetensorError) as caught:
        return _storage_failed(root, tensors, caught)
    return None


def gather(engine: Engine, file: str) -> dict[str, Tensor]:
    """The logical tensors of one file, on rank 0's host; empty on other ranks. Collective."""
    held: dict[str, list[ParamFragment]] = {}
    for fragment in engine.fragments:
        if engine.is_counted(fragment):
            held.setdefault(fragment.name, []).append(fragment)
    device = engine.fragments[0].flat.device if engine.fragments else engine.deepspeed.device
    gathered = {}
    for name, shape in engine.shapes.items():
        # The bits are summed as integers: adding zeros then keeps even the sign of a zero.
        whole = torch.zeros(shape, dtype=torch.int32, device=device)
        mine = shard(whole, engine.shard_dims[name], engine.mesh)
        buffer = torch.zeros(mine.numel(), dtype=torch.int32, device=device)
        for fragment in held.get(name, []):
            source = _fp32(engine, fragment, file)[fragment.in_flat]
            buffer[fragment.in_shard] = source.view(torch.int32)
        mine.copy_(buffer.view(mine.shape))
        dist.reduce(whole, dst=0)
        if engine.mesh.rank == 0:
            gathered[name] = whole.view(torch.float32).cpu()
    return gathered


def _fp32(engine: Engine, fragment: ParamFragment, file: str) -> Tensor:
    """The flat fp32 vector of `fragment`: weights or moments, as `file` says."""
    kind = file.removesuffix(".safetensors")
    flat = fragment.flat if kind == "weights" else engine.optimizer.state[fragment.flat][kind]
    return flat.detach().view(-1)


def _write(root: Path, final: Path, tensors: dict, state: TrainState) -> None:
    temporary = root / f".{final.name}.tmp"
    temporary.mkdir(parents=True)
    checksums = {}
    for file, content in tensors.items():
        save_file(content, temporary / file)
        sync_file(temporary / file)
        checksums[file] = compute_crc32(temporary / file)
    record = {**asdict(state), "crc32": checksums}
    sealed = {**record, "seal": _seal(record)}
    write_file(temporary / "state.json", json.dumps(sealed, indent=1) + "\n", sync=True)
    sync_file(temporary)
    if final.is_symlink() or final.is_file():
        aside = final.with_name(f"{final.name}.{time.time_ns()}")
        os.rename(final, aside)
        log_line(f"{final}: this name was taken; what had it is now {aside.name}")
    elif final.exists():  # a damaged one of the same step
        shutil.rmtree(final)
    os.replace(temporary, final)
    write_file(root / "latest", final.name + "\n", sync=True)
    sync_file(root)


def _seal(record: dict) -> int:
    """Checksum of the values in state.json."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _prune(root: Path, keep_last: int, keep_every: int | None) -> None:
    """Delete what is older than the newest `keep_last` undamaged checkpoints."""
    kept = 0
    for folder in list_checkpoints(root):
        if kept < keep_last:
            try:
                found = [os.stat(folder / file) for file in (*FILES, "state.json")]
                stats = tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found)
                kept += _is_undamaged(folder, stats)
            except OSError as error:
                log_line(f"{folder}: not counted by --keep-last ({error})")
        elif keep_every is None or int(folder.name.removeprefix("step-")) % keep_every:
            shutil.rmtree(folder)


def _storage_failed(root: Path, tensors: dict, caught: Exception) -> MachineFailed:
    needed = sum(t.numel() * 4 for content in tensors.values() for t in content.values())
    for temporary in root.glob(".step-*.tmp"):
        shutil.rmtree(temporary, ignore_errors=True)
    free = shutil.disk_usage(root if root.exists() else root.parent).free
    kept = []
    with contextlib.suppress(OSError):
        kept = [path.name for path in reversed(list_checkpoints(root))]
    return MachineFailed(
        f"could not save under {root} ({getattr(caught, 'strerror', None) or caught}): {needed:,} "
        f"bytes needed, {free:,} free; saved and untouched: {', '.join(kept) or 'nothing'}"
    )


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints in a folder, newest first. Raises OSError where it cannot be read.

    Only folders that have a name which `folder_name` gives count; what else lies there is not ours.
    """
    with os.scandir(root) as entries:
        ours = [
            entry.name
            for entry in entries
            if FOLDER_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return [root / name for name in sorted(ours, reverse=True)]


def find_start(output: Path, mesh: Mesh) -> Path | None:
    """`find_newest` on all ranks; rank 0 prints a line for each damaged checkpoint. Collective."""
    folder, damaged, error = None, [], None
    if mesh.rank == 0:
        try:
            folder, damaged = find_newest(output)
        except (DamagedData, MachineFailed) as caught:
            error = caught
    for line in damaged:
        log_line(line)
    raise_first_error(mesh, error)
    return from_rank_0(mesh, folder)


def find_newest(output: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and one line for each newer one that is damaged.

    None only where nothing was ever saved. Raises MachineFailed where one cannot be read, since it
    may be the newest undamaged one, and DamagedData where all are damaged.
    """
    root, damaged = output / "checkpoints", []
    try:
        if not _exists(root):
            return None, []
        for folder in list_checkpoints(root):
            problem = find_damage(folder)
            if problem is None:
                return folder, [f"{line}; using the one before" for line in damaged]
            damaged.append(f"{folder}: {problem}")
        if not damaged and _exists(root / "latest"):
            damaged = [f"{root / (root / 'latest').read_text().strip()} is gone"]
    except OSError as error:
        raise MachineFailed(
            f"{error.filename or root}: {error.strerror or error}; make it readable, or move the "
            "checkpoint away to resume from an older one"
        ) from error
    if damaged:
        raise DamagedData(
            f"no checkpoint can be resumed: {'; '.join(damaged)}; move {root} away to start over"
        )
    return None, []


def _exists(path: Path) -> bool:
    """Like Path.exists, but raises OSError where the path may not be read."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint. Raises OSError where a file exists and cannot be read."""
    for file in (*FILES, "state.json"):
        if not _exists(folder / file):
            return f"{file} is missing"
        if not stat.S_ISREG(os.stat(folder / file).st_mode):
            return f"{file} is not a file"
    try:
        record = parse_json((folder / "state.json").read_bytes(), "state.json")
        if record.pop("seal") != _seal(record):
            return "state.json is damaged"
        for file in FILES:
            if compute_crc32(folder / file) != record["crc32"][file]:
                return f"{file} is damaged"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"state.json is damaged ({error})"
    return None


@lru_cache
def _is_undamaged(folder: Path, stats: tuple) -> bool:
    """A checkpoint whose files are as they were is not read again."""
    return find_damage(folder) is None


def describe_saved(output: Path) -> str:
    """What is left to go on from, for the message of a run that ends badly."""
    try:
        newest, _ = find_newest(output)
    except (MachineFailed, DamagedData) as error:
        return f"last good checkpoint: none ({error})"
    return f"last good checkpoint: {newest or 'none'}"


def read_state(folder: Path) -> TrainState:
    record = read_json(folder / "state.json")
    return TrainState(**{field.name: record[field.name] for field in fields(TrainState)})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, in host memory. Raises OSError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def restore(folder: Path, engine: Engine) -> TrainState:
    """Fill this rank's moments. The engine was built from the checkpoint's weights."""
    state = read_state(folder)
    for file in FILES[1:]:
        with safe_open(folder / file, framework="pt") as tensors:
            for fragment in engine.fragments:
                whole = tensors.get_tensor(fragment.name)
                mine = shard(whole, engine.shard_dims[fragment.name], engine.mesh).reshape(-1)
                target = _fp32(engine, fragment, file)[fragment.in_flat]
                target.copy_(mine[fragment.in_shard])
    for fragment in engine.fragments:
        set_step_count(engine.optimizer, fragment.flat, state.updates)
    if state.loss_scale is not None:
        _loss_scaler(engine).update(state.loss_scale)
    return state


def read_loss_scale(engine: Engine) -> dict | None:
    """State of fp16's dynamic loss scaler as plain numbers; None in other precisions."""
    if not engine.deepspeed.fp16_enabled():
        return None
    numbers = int | float | bool
    return {k: value for k, value in _loss_scaler(engine).items() if isinstance(value, numbers)}


def _loss_scaler(engine: Engine) -> dict:
    return vars(getattr(engine.deepspeed.optimizer, "loss_scaler"))  # noqa: B009 (untyped there)


class Saver:
    """Writes the checkpoints of a run in the background, one at a time.

    A failed write is raised on all ranks, by the next `save` or `wait`.
    """

    def __init__(self, engine: Engine, config, *, resumed_at: int):
        self._engine, self._output = engine, config.run
        self._keep = {"keep_last": config.keep_last, "keep_every": config.keep_every}
        self._newest = resumed_at  # step of the checkpoint that is saved or being written
        self._writer: threading.Thread | None = None
        self._error: MachineFailed | Diverged | None = None

    def save(self, state: TrainState) -> None:
        """Start writing a checkpoint of `state`, unless its step is saved already. Collective."""
        self.wait()
        if state.step == self._newest > 0:
            return
        started = time.perf_counter()
        tensors = gather_all(self._engine)
        self._newest = state.step
        if self._engine.mesh.rank == 0:
            pause = time.perf_counter() - started
            job = (tensors, state, pause)
            self._writer = threading.Thread(target=self._write, args=job, name=SAVER_THREAD)
            self._writer.start()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Collective; raises MachineFailed or Diverged."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        raise_first_error(self._engine.mesh, self._error)

    def _write(self, tensors: dict, state: TrainState, pause: float) -> None:
        started = time.perf_counter()
        self._error = write_checkpoint(self._output, tensors, state, **self._keep)
        if self._error is None:
            seconds = time.perf_counter() - started
            print(
                f"saved step {state.step}: training paused {pause:.3f} s, written in {seconds:.2f}",
                flush=True,
            )
