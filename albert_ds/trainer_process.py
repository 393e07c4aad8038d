"""From a launcher's environment to exit.json: how every run of a trainer begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

from albert_ds.cli import peek_output
from albert_ds.errors import ENDINGS
from albert_ds.model.config import count_params
from albert_ds.parallel.mesh import build_mesh
from albert_ds.run_config import SharedConfig
from albert_ds.runtime.environment import check_memory, read_world
from albert_ds.runtime.heartbeat import Heartbeat
from albert_ds.runtime.rendezvous import join_world, use_deterministic_algorithms
from albert_ds.runtime.run_folder import (
    RunLock,
    end_hung_run,
    finish_run,
    lock_run_folder,
    name_failure,
)
from albert_ds.runtime.stop_request import StopRequest

if TYPE_CHECKING:
    import torch

    from albert_ds.parallel.mesh import Mesh


class HasStep(Protocol):
    step: int  # finished optimizer steps


class TrainerProcess:
    """The world, the groups and the lock of one process; `start` creates all but the world."""

    def __init__(self):
        self.world = read_world()
        self.request: StopRequest
        self.device: torch.device
        self.mesh: Mesh | None = None
        self.heartbeat: Heartbeat | None = None
        self.lock: RunLock | None = None
        self.run: HasStep | None = None  # the trainer puts its run here; exit.json names its step

    def start(self, config: SharedConfig, write_files: Callable[[], None]) -> Mesh:
        """Meet the other ranks, lock RUN, and let rank 0 write RUN's files. Collective."""
        minutes = config.timeout_minutes
        self.request = StopRequest(config.run, config.max_hours)
        if config.deterministic:
            use_deterministic_algorithms()
        self.device = join_world(self.world, timeout_minutes=minutes)
        check_memory(sum(count_params(config.model).values()), self.world, self.device.type)
        on_hang = partial(end_hung_run, self.world, config.run)
        self.heartbeat = Heartbeat(self.world, on_hang=on_hang, minutes=minutes)
        self.mesh = build_mesh(config.tensor_parallel, timeout_minutes=minutes)
        self.lock = lock_run_folder(config.run, self.mesh, write_files)
        return self.mesh

    def follow(self, batches: Iterator) -> Iterator:
        """`batches`; the heartbeat counts each one that is taken as progress."""
        assert self.heartbeat is not None
        return self.heartbeat.follow(batches)


def run_trainer(argv: list[str], work: Callable[[TrainerProcess], None]) -> int:
    """Run `work`, then write exit.json and one line for the user; returns the exit code."""
    process = None
    try:
        process = TrainerProcess()
        work(process)
        code, reason = 0, "all steps done"
    except ENDINGS as ending:
        code, reason = ending.code, str(ending)
    except (RuntimeError, OSError) as error:
        lost = process.lock.find_loss() if process and process.lock else None
        heartbeat = process.heartbeat if process else None
        code, reason = (lost.code, str(lost)) if lost else name_failure(error, heartbeat)
    finish_run(
        process.world if process else None,
        process.mesh if process else None,
        process.lock if process else None,
        peek_output(argv),
        code=code,
        reason=reason,
        step=process.run.step if process and process.run else None,
        heartbeat=process.heartbeat if process else None,
    )
    return code
