"""Checkpoints that no layout can be told from: logical tensors by name, and one small JSON.

    RUN/checkpoints/step-00001000/weights.safetensors      fp32 weights
                                  exp_avg.safetensors      first moments
                                  exp_avg_sq.safetensors   second moments
                                  state.json               step, data position, checksums
    RUN/checkpoints/latest                                 name of the newest

Sharing keeps all of it small (12 bytes for each of 12 to 223 million parameters), so any layout
writes whole tensors and any layout reads them. Random numbers are a function of (seed, step, rank)
and the data position is one integer: nothing else needs to be kept.

A folder gets its final name in one atomic rename after every file has reached the disk; what has
that name is complete. `latest` is replaced after that, never in place.
"""

import json
import os
import shutil
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from albert_ds.errors import MachineFailed
from albert_ds.optim.zero import Piece, set_step_count
from albert_ds.parallel.tensor import shard
from albert_ds.runtime.agreement import raise_first
from albert_ds.runtime.engine import Engine

FILES = ("weights.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Where a run is: everything in it is saved, nothing else is needed."""

    step: int  # finished optimizer steps
    samples: int  # position in the data stream
    updates: int  # applied updates: steps less those skipped for a gradient that was not finite
    loss_scale: dict | None  # fp16's dynamic scaler


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
    """Write a complete checkpoint and drop old ones. Collective; raises MachineFailed on all.

    The newest `keep_last` stay, and for good those whose step is a multiple of `keep_every`.
    """
    tensors = gather_all(engine)
    error = None
    if engine.mesh.rank == 0:
        error = write_checkpoint(output, tensors, state, keep_last=keep_last, keep_every=keep_every)
    raise_first(engine.mesh, error)
    return output / "checkpoints" / folder_name(state.step)


def gather_all(engine: Engine) -> dict[str, dict[str, Tensor]]:
    """All of a checkpoint's tensors by file, on rank 0 and on the host. Collective."""
    return {name: gather(engine, name) for name in FILES}


def write_checkpoint(
    output: Path, tensors: dict, state: TrainState, *, keep_last: int, keep_every: int | None
) -> MachineFailed | None:
    """Put a checkpoint on the disk, complete or not at all; returns what went wrong."""
    root = output / "checkpoints"
    try:
        for left_over in root.glob(".step-*.tmp"):  # of a run that was killed while it saved
            shutil.rmtree(left_over)
        _write(root, root / folder_name(state.step), tensors, state)
        _prune(root, keep_last, keep_every)
    except (OSError, SafetensorError) as caught:
        return _storage_failed(root, tensors, caught)
    return None


def gather(engine: Engine, file: str) -> dict[str, Tensor]:
    """The logical tensors of one file, on rank 0 and on the host; empty elsewhere."""
    held: dict[str, list[Piece]] = {}
    for piece in engine.pieces:
        if engine.is_counted(piece):
            held.setdefault(piece.name, []).append(piece)
    device = engine.pieces[0].flat.device if engine.pieces else engine.deepspeed.device
    gathered = {}
    for name, shape in engine.shapes.items():
        # Bits as integers: a sum with zeros then changes nothing, not even the sign of a zero.
        whole = torch.zeros(shape, dtype=torch.int32, device=device)
        mine = shard(whole, engine.shard_dims[name], engine.mesh)
        buffer = torch.zeros(mine.numel(), dtype=torch.int32, device=device)
        for piece in held.get(name, []):
            source = _fp32(engine, piece, file)[piece.start : piece.start + piece.numel]
            buffer[piece.offset : piece.offset + piece.numel] = source.view(torch.int32)
        mine.copy_(buffer.view(mine.shape))
        dist.reduce(whole, dst=0)
        if engine.mesh.rank == 0:
            gathered[name] = whole.view(torch.float32).cpu()
    return gathered


def _fp32(engine: Engine, piece: Piece, file: str) -> Tensor:
    """The flat fp32 vector in which `piece` lies, of the kind that `file` holds."""
    kind = file.removesuffix(".safetensors")
    flat = piece.flat if kind == "weights" else engine.optimizer.state[piece.flat][kind]
    return flat.detach().view(-1)


def _write(root: Path, final: Path, tensors: dict, state: TrainState) -> None:
    temporary = root / f".{final.name}.tmp"
    temporary.mkdir(parents=True)
    checksums = {}
    for file, content in tensors.items():
        save_file(content, temporary / file)
        _sync(temporary / file)
        checksums[file] = _checksum(temporary / file)
    record = {**asdict(state), "crc32": checksums}
    sealed = {**record, "seal": _seal(record)}
    (temporary / "state.json").write_text(json.dumps(sealed, indent=1) + "\n")
    _sync(temporary / "state.json")
    _sync(temporary)
    if final.exists():  # a damaged one of the same step, or one written again after a resume
        shutil.rmtree(final)
    os.replace(temporary, final)
    pointer = root / ".latest.tmp"
    pointer.write_text(final.name + "\n")
    _sync(pointer)
    os.replace(pointer, root / "latest")
    _sync(root)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _seal(record: dict) -> int:
    """Checksum of state.json's own values."""
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _prune(root: Path, keep_last: int, keep_every: int | None) -> None:
    for old in sorted(root.glob("step-*"))[:-keep_last]:
        if keep_every is None or int(old.name.removeprefix("step-")) % keep_every:
            shutil.rmtree(old)


def _storage_failed(root: Path, tensors: dict, caught: Exception) -> MachineFailed:
    needed = sum(t.numel() * 4 for content in tensors.values() for t in content.values())
    for temporary in root.glob(".step-*.tmp"):
        shutil.rmtree(temporary, ignore_errors=True)
    free = shutil.disk_usage(root if root.exists() else root.parent).free
    kept = [path.name for path in sorted(root.glob("step-*"))]
    return MachineFailed(
        f"could not save under {root} ({getattr(caught, 'strerror', None) or caught}): {needed:,} "
        f"bytes needed, {free:,} free; saved and untouched: {', '.join(kept) or 'nothing'}"
    )


def find_newest(output: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose every byte is right, and a line on each that is not."""
    damaged = []
    for folder in sorted((output / "checkpoints").glob("step-*"), reverse=True):
        problem = _find_damage(folder)
        if problem is None:
            return folder, damaged
        damaged.append(f"{folder}: {problem}; using the one before")
    return None, damaged


def _find_damage(folder: Path) -> str | None:
    try:
        record = json.loads((folder / "state.json").read_text())
        if record.pop("seal") != _seal(record):
            return "state.json is damaged"
        for file, checksum in record["crc32"].items():
            if _checksum(folder / file) != checksum:
                return f"{file} is damaged"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"unreadable ({error})"
    return None


def read_state(folder: Path) -> TrainState:
    record = json.loads((folder / "state.json").read_text())
    return TrainState(**{field.name: record[field.name] for field in fields(TrainState)})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All logical tensors of one file, on the host; never unpickles."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def restore(folder: Path, engine: Engine) -> TrainState:
    """Fill this rank's masters and moments; the model was built from the same weights."""
    state = read_state(folder)
    for file in FILES:
        with safe_open(folder / file, framework="pt") as tensors:
            for piece in engine.pieces:
                whole = tensors.get_tensor(piece.name)
                mine = shard(whole, engine.shard_dims[piece.name], engine.mesh).reshape(-1)
                target = _fp32(engine, piece, file)[piece.start : piece.start + piece.numel]
                target.copy_(mine[piece.offset : piece.offset + piece.numel])
    for piece in engine.pieces:
        set_step_count(engine.optimizer, piece.flat, state.updates)
    if state.loss_scale is not None:
        _loss_scaler(engine).update(state.loss_scale)
    return state


def read_loss_scale(engine: Engine) -> dict | None:
    """fp16's dynamic scaler as plain numbers; None in other precisions."""
    if not engine.deepspeed.fp16_enabled():
        return None
    numbers = int | float | bool
    return {k: value for k, value in _loss_scaler(engine).items() if isinstance(value, numbers)}


def _loss_scaler(engine: Engine) -> dict:
    return vars(getattr(engine.deepspeed.optimizer, "loss_scaler"))  # noqa: B009 (untyped there)


def describe_saved(output: Path) -> str:
    """What a user whose run ended badly still has."""
    newest = max((output / "checkpoints").glob("step-*"), default=None)
    return f"last good checkpoint: {newest or 'none'}"
