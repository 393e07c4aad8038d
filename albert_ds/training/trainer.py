"""The process of a trainer, from the launcher's variables to the exit code.

with TrainerProcess(argv) as process:
    world = process.read_world()      # the command line can be checked now
    mesh = process.connect(...)       # all ranks are there; nothing is written
    lock = process.lock()             # RUN is ours
    process.track(run)                # exit.json names its step
return process.code
"""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Protocol

from albert_ds.base.cli import LastingStream, log_line, open_closed_streams, peek_output
from albert_ds.base.errors import MachineFailed
from albert_ds.checkpoint.run_folder import RunLock, may_write_exit, start_run
from albert_ds.process.ending import (
    DEFECT,
    Ending,
    explain,
    leave_process,
    print_ending,
    write_exit,
)
from albert_ds.process.quiet import NativeLog, name_log, quiet_libraries
from albert_ds.process.stop_request import StopRequest
from albert_ds.process.world import World, peek_world, read_world

if TYPE_CHECKING:  # they import torch: `--help` does without
    import torch

    from albert_ds.parallel.mesh import Mesh
    from albert_ds.process.heartbeat import Heartbeat


class HasStep(Protocol):
    step: int  # finished optimizer steps


class TrainerProcess:
    """One rank of a training, as a context.

    However the block ends, all ranks end with one code and one cause, which exit.json and one line
    on stderr name; `code` is then the exit code. A defect of this program is raised again if there
    are no other ranks to end.
    """

    code: int
    # From `connect` on:
    device: torch.device
    mesh: Mesh
    stop_request: StopRequest

    def __init__(self, argv: list[str]):
        self.world = peek_world()
        self._folder = peek_output(argv)  # RUN, also of a command line that is wrong elsewhere
        self._owns_folder = False
        self._lock: RunLock | None = None
        self._store: torch.distributed.Store | None = None
        self._heartbeat: Heartbeat | None = None
        self._native_log: NativeLog | None = None
        self._run: HasStep | None = None

    def __enter__(self) -> TrainerProcess:
        open_closed_streams()
        sys.stdout = LastingStream(sys.stdout)
        sys.stderr = LastingStream(sys.stderr)
        quiet_libraries()
        return self

    def read_world(self) -> World:
        """This rank among those that the launcher started. Raises UserError."""
        self.world = read_world()
        return self.world

    def connect(self, config, same: str) -> Mesh:
        """Connect to the other ranks; nothing is written. Collective.

        config: a `SharedConfig` of settings/. same: a hash that all ranks must have. Raises what
        `connect_ranks` raises.
        """
        from albert_ds.parallel.mesh import build_mesh
        from albert_ds.process import heartbeat, rendezvous

        world = self.world
        folder = self._folder
        minutes = config.timeout_minutes
        assert folder is not None, "the command line was checked"
        self.stop_request = StopRequest(
            folder / "STOP" if world.rank == 0 else None,
            config.max_hours,
            has_launcher=world.launcher != "none",
        )
        if config.deterministic:
            rendezvous.use_deterministic_algorithms()
        rendezvous.order_kernels(config.tensor_parallel)
        self._native_log = NativeLog() if world.size > 1 else None
        self._store = rendezvous.host_store(world, minutes=minutes)
        self.device = rendezvous.connect_ranks(world, self._store, same, timeout_minutes=minutes)
        self._heartbeat = heartbeat.Heartbeat(world, folder, record=self._record, minutes=minutes)
        rendezvous.open_groups(world, self._store, self.device, timeout_minutes=minutes)
        self.mesh = build_mesh(config.tensor_parallel, timeout_minutes=minutes)
        return self.mesh

    def lock(self) -> RunLock | None:
        """Lock RUN until the process ends. Collective; returns the lock on rank 0."""
        from albert_ds.parallel.consensus import raise_together

        assert self._folder is not None
        with raise_together(self.mesh):
            if self.world.rank == 0:
                self._lock = start_run(self._folder, self.world.size)
        self._owns_folder = True
        if self._native_log is not None:
            self._native_log.keep_in(name_log(self._folder, [self.world.rank]))
        return self._lock

    def track(self, run: HasStep) -> None:
        """From now on exit.json names the step of `run`."""
        self._run = run

    def __exit__(self, kind, error: BaseException | None, trace) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False  # --help has printed
        own = explain(error) if error else Ending(0, "all steps done")
        if error is not None and own.code == DEFECT:
            if self.world.size == 1:
                return False
            traceback.print_exception(error)
        if self._heartbeat is None:
            self._end_early(own, error)
            return True
        ending = self._heartbeat.end_together(own)
        print_ending(self.world, ending)
        self.code = ending.code
        if ending.code == MachineFailed.code or (self.world.size > 1 and not ending.is_orderly):
            leave_process(ending.code)  # to wait for peers, or for a loader's worker, may hang
        import torch.distributed as dist

        dist.destroy_process_group()
        return True

    def _end_early(self, own: Ending, error: Exception | None) -> None:
        """End before the ranks have met, and tell those that wait."""
        world = self.world
        self.code = own.code
        # Before the others know: when they leave, a launcher may kill this process.
        if world.rank == 0:
            self._record(own)
        print_ending(world, own)
        if own.code and world.size > 1:
            from albert_ds.process.rendezvous import Unreachable, notify_ranks

            can_tell = not isinstance(error, Unreachable)
            if can_tell and notify_ranks(world, self._store, own) and world.local_rank > 0:
                log_line(own.reason)

    def _record(self, ending: Ending) -> None:
        """Write exit.json if RUN is this run's; of ranks above 0 only one without rank 0."""
        folder = self._folder
        is_first = self.world.rank == 0
        step = self._run.step if self._run else None
        is_ours = self._owns_folder and not ending.is_orderly
        if folder and (may_write_exit(folder, self._lock) if is_first else is_ours):
            write_exit(folder, ending, step, replace=is_first)
