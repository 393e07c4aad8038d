"""What both trainers have alike: how a run goes on, how far it is, what it saves, how it ends."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from albert_ds.base.cli import log_line
from albert_ds.base.errors import DamagedData, Diverged, Stopped
from albert_ds.checkpoint.folder import STATE, Checkpoint, TrainState, describe_saved
from albert_ds.checkpoint.gather import Saver, restore
from albert_ds.checkpoint.run_folder import RunLock
from albert_ds.engine.engine import Engine
from albert_ds.parallel.mesh import Mesh, find_drift
from albert_ds.process.stop_request import StopRequest

# A non-finite gradient skips its step; fp16 needs up to 17 of these to find its loss scale.
MAX_SKIPPED_IN_A_ROW = 20
DRIFT_CHECK_EVERY = 100  # steps


@dataclass(kw_only=True, slots=True)
class TrainingRun:
    """A run between two steps."""

    config: Any  # a `SharedConfig` of settings/
    mesh: Mesh
    device: torch.device
    engine: Engine
    lock: RunLock | None = None  # on rank 0
    step: int = 0  # finished steps
    updates: int = 0  # steps without those that were skipped
    skipped_in_a_row: int = 0

    def is_due(self, every: int) -> bool:
        """Whether work that is done every `every` steps, and at the last step, is due now."""
        return self.step % every == 0 or self.step == self.config.steps

    def count_step(self, *, applied: bool) -> None:
        """Count a step, and whether its update was applied."""
        self.step += 1
        self.updates += applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1

    def save(self, saver: Saver) -> None:
        """Start writing a checkpoint, unless this step has one. Collective."""
        samples = self.config.samples_at(self.step)
        saver.save(step=self.step, samples=samples, updates=self.updates)

    def check_health(self) -> None:
        """Raise Diverged after too many skipped steps. Collective over tensor-parallel peers.

        Every DRIFT_CHECK_EVERY steps also assert that replicated parameters are equal bit for bit.
        """
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise self.diverged()
        if self.step % DRIFT_CHECK_EVERY == 0:
            drifted = find_drift(self.engine.deepspeed.module, self.mesh)
            assert not drifted, f"replicas differ across tensor-parallel peers: {drifted}"

    def diverged(self) -> Diverged:
        """The ending of a run whose last steps were all skipped."""
        return Diverged(
            f"the gradient was not finite {self.skipped_in_a_row} steps in a row, up to step "
            f"{self.step}; {describe_saved(self.config.run)}"
        )

    def stopped(self, request: StopRequest) -> Stopped:
        """The ending of a run that was asked to stop, here or on another rank, and has saved."""
        reason = request.reason or "another rank was asked to stop"
        return Stopped(f"stopped after step {self.step} of {self.config.steps}: {reason}")


def cut_model(model: nn.Module, mesh: Mesh) -> None:
    """Replace the layers of a model that tensor parallelism cuts by this rank's parts of them."""
    if mesh.tp_size > 1:
        from albert_ds.parallel.tensor import apply_tensor_parallel  # imports megatron-core

        apply_tensor_parallel(model, mesh)


def go_on(config: Any, engine: Engine, checkpoint: Checkpoint | None) -> TrainState:
    """Where a run is, whose engine was built from the weights of `checkpoint`; fills the moments.

    At the start without one. Raises DamagedData if its samples are not those of its steps.
    """
    if checkpoint is None:
        return TrainState(step=0, samples=0, updates=0, loss_scale=None)
    state = restore(checkpoint, engine)
    samples = config.samples_at(state.step)
    if state.samples != samples:
        place = checkpoint.path / STATE
        raise DamagedData(f"{place}: samples {state.samples}: must be {samples}")
    if engine.mesh.rank == 0:
        log_line(f"resuming from {checkpoint.path}: step {state.step} of {config.steps}")
    return state
