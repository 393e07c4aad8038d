"""Saving while training goes on: it pauses to gather the tensors, a thread of rank 0 writes them.

Writing, syncing and checksumming release Python's lock, so the steps go on beside them. A write
that failed is raised, on all ranks, where the next one begins or the training ends.
"""

import threading
import time

from albert_ds.errors import MachineFailed
from albert_ds.runtime.agreement import raise_first
from albert_ds.runtime.checkpoint import TrainState, gather_all, write_checkpoint
from albert_ds.runtime.engine import Engine


class Saver:
    """Writes checkpoints of a run, one at a time."""

    def __init__(self, engine: Engine, config, *, resumed_at: int):
        self._engine, self._output = engine, config.run
        self._keep = {"keep_last": config.keep_last, "keep_every": config.keep_every}
        self._newest = resumed_at  # step of what is saved or being written
        self._writer: threading.Thread | None = None
        self._error: MachineFailed | None = None

    def save(self, state: TrainState) -> None:
        """Begin to write a checkpoint of now, unless that is saved already. Collective."""
        self.wait()
        if state.step == self._newest > 0:
            return
        started = time.perf_counter()
        tensors = gather_all(self._engine)
        self._newest = state.step
        if self._engine.mesh.rank == 0:
            pause = time.perf_counter() - started
            self._writer = threading.Thread(target=self._write, args=(tensors, state, pause))
            self._writer.start()

    def wait(self) -> None:
        """Until the checkpoint being written is complete. Collective; raises MachineFailed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        raise_first(self._engine.mesh, self._error)

    def _write(self, tensors: dict, state: TrainState, pause: float) -> None:
        started = time.perf_counter()
        self._error = write_checkpoint(self._output, tensors, state, **self._keep)
        if self._error is None:
            seconds = time.perf_counter() - started
            print(
                f"saved step {state.step}: training paused {pause:.3f} s, written in {seconds:.2f}",
                flush=True,
            )
