"""From a launcher's environment to exit.json: how every run of a trainer begins and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from albert_ds.cli import peek_output
from albert_ds.model.shapes import count_params
from albert_ds.parallel.mesh import build_mesh
from albert_ds.process.ending import (
    Ending,
    leave_process,
    name_defect,
    name_ending,
    say,
    write_exit,
)
from albert_ds.process.heartbeat import Heartbeat
from albert_ds.process.native_log import NativeLog, name_log
from albert_ds.process.rendezvous import meet_ranks, open_groups, use_deterministic_algorithms
from albert_ds.process.run_folder import RunLock, is_ours, lock_run_folder
from albert_ds.process.stop_request import StopRequest
from albert_ds.process.world import World, check_memory, read_world
from albert_ds.report.screen import describe_run, quiet_libraries, show_facts
from albert_ds.settings.shared import SharedConfig

if TYPE_CHECKING:
    import torch

    from albert_ds.engine.engine import Engine
    from albert_ds.parallel.mesh import Mesh

GRACE_SECONDS = 2.0  # rank 0 writes exit.json before our exit makes a launcher kill it


class HasStep(Protocol):
    step: int  # finished optimizer steps


class TrainerProcess:
    """The world, the groups and the lock of one process: `meet`, then `claim`."""

    def __init__(self, argv: list[str]):
        self.output = peek_output(argv)
        self.world = World(rank=0, local_rank=0, size=1, launcher="none")
        self.request: StopRequest
        self.device: torch.device
        self.mesh: Mesh | None = None
        self.heartbeat: Heartbeat | None = None
        self.has_run = False  # RUN is this run's, not another's
        self.lock: RunLock | None = None
        self.run: HasStep | None = None  # the trainer puts its run here; exit.json names its step

    def meet(self, config: SharedConfig) -> Mesh:
        """Meet the other ranks; nothing is written. Collective."""
        minutes = config.timeout_minutes
        has_launcher = self.world.launcher != "none"
        self.request = StopRequest(config.run, config.max_hours, has_launcher)
        if config.deterministic:
            use_deterministic_algorithms()
        self._log = NativeLog() if self.world.size > 1 else None
        self.device, store = meet_ranks(self.world, timeout_minutes=minutes)
        self._store = store  # it lives in rank 0 until the process ends
        self.heartbeat = Heartbeat(self.world, config.run, record=self.record, minutes=minutes)
        open_groups(self.world, store, self.device, timeout_minutes=minutes)
        check_memory(sum(count_params(config.model).values()), self.world, self.device.type)
        self.mesh = build_mesh(config.tensor_parallel, timeout_minutes=minutes)
        return self.mesh

    def claim(self, run: Path, write_files: Callable[[], None] = lambda: None) -> None:
        """Lock RUN, and let rank 0 write its files. Collective."""
        assert self.mesh is not None
        self.lock = lock_run_folder(run, self.mesh, write_files)
        self.has_run = True
        if self._log is not None:
            self._log.keep_in(name_log(run, [self.world.rank]))

    def introduce(
        self, config: SharedConfig, engine: Engine, size: str, title: str, data: str
    ) -> None:
        """Show what runs: under `title` the model, of that `size`, its layout and data. Collective.

        The engine holds the model of the whole run, also where layers come step by step.
        """
        from albert_ds.parallel.consensus import gather_hosts

        assert self.mesh is not None
        num_nodes = len({*gather_hosts(self.mesh)})
        if self.world.rank > 0:
            return
        facts = describe_run(
            size,
            config.model,
            sum(shape.numel() for shape in engine.shapes.values()),
            self.mesh,
            config.deepspeed,
            num_nodes=num_nodes,
            device=self.device.type,
            batch_size=config.batch_size,
            micro_batch_size=config.micro_batch_size,
        )
        facts |= {"data": data, "time": "what is left, by measured steps, ends the lines below"}
        show_facts(config.log_format, "start", title, facts)

    def conclude(self, config: SharedConfig, facts: dict[str, str]) -> None:
        """Show what was written, and what to run next."""
        if self.world.rank == 0:
            show_facts(config.log_format, "end", f"done: {config.output}", facts)

    def follow(self, batches: Iterator) -> Iterator:
        """`batches`; the heartbeat counts each one that is taken as progress."""
        assert self.heartbeat is not None
        return self.heartbeat.follow(batches)

    def record(self, ending: Ending) -> None:
        """Write exit.json where RUN is this run's; ranks above 0 only where nobody else has."""
        output, is_first = self.output, self.world.rank == 0
        step = self.run.step if self.run else None
        if output and (is_ours(output, self.lock) if is_first else self.has_run):
            write_exit(output, ending, step, replace=is_first)

    def leave(self, mine: Ending) -> int:
        """Agree with all ranks how the run ends, say so and leave; returns the exit code."""
        ending = mine
        if self.heartbeat is not None:
            ending = self.heartbeat.settle(mine)
        elif self.world.rank == 0:
            self.record(mine)
        say(self.world, ending)
        if self.heartbeat is None:
            time.sleep(GRACE_SECONDS if self.world.rank > 0 else 0)
            return ending.code
        if self.world.size > 1 and not ending.is_orderly:
            leave_process(ending.code)
        import torch.distributed as dist

        dist.destroy_process_group()
        return ending.code


def run_trainer(argv: list[str], work: Callable[[TrainerProcess], None]) -> int:
    """Run `work`, then write exit.json and one line for the user; returns the exit code.

    A defect of this program is raised again, where there are no other ranks to end.
    """
    process = TrainerProcess(argv)
    quiet_libraries()
    try:
        process.world = read_world()
        work(process)
        mine = Ending(0, "all steps done")
    except Exception as error:
        lost = process.lock.find_loss() if process.lock else None
        mine = name_ending(lost or error)
        if mine is None and (process.heartbeat is None or process.world.size == 1):
            raise
        mine = mine or name_defect(error)
    return process.leave(mine)
