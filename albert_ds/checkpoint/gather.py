"""Layout-independent checkpoints: whole tensors by name, gathered from every rank and read back.

Every layout writes whole tensors, and every layout reads them. Parameter sharing keeps them small:
12 bytes for each of 12 to 223 million parameters. Random numbers are a function of (seed, step,
rank) and the data position is one integer, so nothing else has to be saved. The files are those of
`folder.py`.

`Saver` writes while training goes on: training pauses while the tensors are gathered, then a thread
of rank 0 writes them. Writing, syncing and checksumming release Python's lock.
"""

import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from albert_ds.checkpoint.folder import (
    FILES,
    Shapes,
    TrainState,
    find_newest,
    read_state,
    write_checkpoint,
)
from albert_ds.cli import log_line
from albert_ds.engine.engine import Engine
from albert_ds.optim.zero import ParamFragment, set_step_count
from albert_ds.parallel.consensus import from_rank_0, raise_first_error, raise_together
from albert_ds.parallel.mesh import Mesh
from albert_ds.parallel.shard import shard
from albert_ds.process.run_folder import RunLock


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


def find_start(output: Path, mesh: Mesh, shapes: Shapes) -> Path | None:
    """`find_newest` on all ranks; rank 0 prints a line for each damaged checkpoint. Collective."""
    folder = None
    with raise_together(mesh):
        if mesh.rank == 0:
            folder, damaged = find_newest(output, shapes)
            for line in damaged:
                log_line(line)
    return from_rank_0(mesh, folder)


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


def _loss_scaler(engine: Engine) -> dict:
    return vars(getattr(engine.deepspeed.optimizer, "loss_scaler"))  # noqa: B009 (untyped there)


class Saver:
    """Writes the checkpoints of a run in the background, one at a time.

    The newest `keep_last` are kept, and every one whose step is a multiple of `keep_every`. A
    failed write is raised on all ranks, by the next `save` or `wait`.
    """

    def __init__(
        self,
        engine: Engine,
        output: Path,
        *,
        keep_last: int,
        keep_every: int | None = None,
        lock: RunLock | None = None,
        resumed_at: int = 0,
    ):
        self._engine = engine
        self._write_kept = partial(
            write_checkpoint, output, keep_last=keep_last, keep_every=keep_every, lock=lock
        )
        self._newest = resumed_at  # step of the checkpoint that is saved or being written
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, *, step: int, samples: int, updates: int) -> None:
        """Start writing a checkpoint, unless this step is saved already. Collective."""
        self.wait()
        if step == self._newest > 0:
            return
        self._newest = step
        started = time.perf_counter()
        tensors = {file: gather(self._engine, file) for file in FILES}
        loss_scale = None
        if self._engine.deepspeed.fp16_enabled():  # its dynamic scaler, as plain numbers
            scaler, numbers = _loss_scaler(self._engine), int | float | bool
            loss_scale = {name: x for name, x in scaler.items() if isinstance(x, numbers)}
        state = TrainState(step=step, samples=samples, updates=updates, loss_scale=loss_scale)
        if self._engine.mesh.rank == 0:
            pause = time.perf_counter() - started
            self._writer = threading.Thread(target=self._write, args=(tensors, state, pause))
            self._writer.start()

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Collective; raises MachineFailed or Diverged."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        raise_first_error(self._engine.mesh, self._error)

    def _write(self, tensors: dict, state: TrainState, pause: float) -> None:
        started = time.perf_counter()
        try:
            self._write_kept(tensors, state)
        except Exception as error:  # a defect too: a run that cannot save must not go on
            self._error = error
            return
        seconds = time.perf_counter() - started
        log_line(
            f"saved step {state.step}: training paused {pause:.3f} s, written in {seconds:.2f}"
        )
