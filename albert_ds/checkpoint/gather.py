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

from torch import Tensor

from albert_ds.base.cli import log_line
from albert_ds.checkpoint.folder import (
    AVERAGE,
    FILES,
    Checkpoint,
    Shapes,
    TrainState,
    open_newest,
    write_checkpoint,
)
from albert_ds.checkpoint.run_folder import RunLock
from albert_ds.engine.engine import Engine
from albert_ds.optim.fragments import ParamFragment
from albert_ds.parallel.consensus import from_rank_0, raise_first_error, raise_together
from albert_ds.parallel.mesh import Mesh


def list_files(engine: Engine) -> tuple[str, ...]:
    """The files of tensors in a checkpoint of this engine, the weights first."""
    return FILES if engine.average is None else (*FILES, AVERAGE)


def gather(engine: Engine, file: str) -> dict[str, Tensor]:
    """The logical tensors of one file, on rank 0's host; empty on other ranks. Collective."""
    gathered = {}
    for fragment in engine.fragments:
        whole = engine.collect(fragment, _piece(engine, fragment, file), rank=0)
        if whole is not None:
            gathered[fragment.name] = whole.cpu()
    return gathered


def _piece(engine: Engine, fragment: ParamFragment, file: str) -> Tensor:
    """The fp32 elements of `fragment`, flat: weights, a moment or the average, as `file` says.

    A moment that the optimizer does not keep is 0 in the file.
    """
    kind = file.removesuffix(".safetensors")
    flat = fragment.flat
    if kind != "weights":
        flat = engine.optimizer.state[flat].get(kind)
    if flat is None:
        return fragment.flat.new_zeros(fragment.numel)
    return flat.detach().view(-1)[fragment.in_flat]


def open_start(output: Path, mesh: Mesh, shapes: Shapes) -> Checkpoint | None:
    """`open_newest` on all ranks; rank 0 checks it, and prints a line for each damaged checkpoint.

    Collective.
    """
    newest = None
    with raise_together(mesh):
        if mesh.rank == 0:
            newest, damaged = open_newest(output, shapes)
            for line in damaged:
                log_line(line)
    path = from_rank_0(mesh, newest and newest.path)
    return newest if mesh.rank == 0 or path is None else Checkpoint(path)


def restore(checkpoint: Checkpoint, engine: Engine) -> TrainState:
    """Fill this rank's moments and average. The engine was built from the checkpoint's weights."""
    state = checkpoint.state
    for file in list_files(engine)[1:]:
        tensors = checkpoint.map(file)
        for fragment in engine.fragments:
            whole = tensors.get_tensor(fragment.name)
            _piece(engine, fragment, file).copy_(engine.cut(fragment, whole))
    engine.set_update_count(state.updates)
    if state.loss_scale is not None:
        _loss_scaler(engine).update(state.loss_scale)
    return state


def _loss_scaler(engine: Engine) -> dict:
    return vars(getattr(engine.deepspeed.optimizer, "loss_scaler"))  # noqa: B009 (untyped there)


class Saver:
    """Writes the checkpoints of a run in the background, one at a time.

    The newest `keep_last` are kept, `keep_step`, and every multiple of `keep_every`. A failed
    write is raised on all ranks, by the next `save` or `wait`.
    """

    def __init__(
        self,
        engine: Engine,
        output: Path,
        *,
        keep_last: int,
        keep_every: int | None = None,
        keep_step: int | None = None,
        lock: RunLock | None = None,
        resumed_at: int = 0,
    ):
        self._engine = engine
        kept = {"keep_last": keep_last, "keep_every": keep_every, "keep_step": keep_step}
        self._write_kept = partial(write_checkpoint, output, **kept, lock=lock)
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
        tensors = {file: gather(self._engine, file) for file in list_files(self._engine)}
        loss_scale = None
        if self._engine.deepspeed.fp16_enabled():  # its dynamic scaler, as plain numbers
            scaler = _loss_scaler(self._engine)
            numbers = int | float | bool
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
