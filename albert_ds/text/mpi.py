"""The processes that build shards together: those that MPI started, or this one alone.

mpi4py carries small results between them. Text and sequences go over the disk only.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from albert_ds.cli import log_line, require
from albert_ds.errors import ENDINGS, UserError

T = TypeVar("T")
POLL_SECONDS = 0.5


class Ranks:
    """`rank` of `size` processes; alone, nothing is imported and nothing is sent."""

    def __init__(self, comm: Any = None):
        self._comm = comm
        self.rank: int = comm.Get_rank() if comm else 0
        self.size: int = comm.Get_size() if comm else 1

    def gather(self, value: T) -> list[T]:
        """The value of every process, on every process. Collective."""
        return self._comm.allgather(value) if self._comm else [value]

    def from_first(self, make: Callable[[], T]) -> T:
        """The result of `make` in the first process, on every process. Collective.

        Where it fails, all processes end.
        """
        if not self._comm:
            return make()
        value, ending = None, None
        if self.rank == 0:
            try:
                value = make()
            except (*ENDINGS, SystemExit) as error:
                ending = error
        value, failed = self._comm.bcast((value, ending is not None))
        if ending is not None:
            raise ending
        if failed:
            raise SystemExit(0)  # the first process says why, and its code is the launcher's
        return value

    def abort(self, code: int) -> None:
        """End every process: one that left alone would leave the others waiting."""
        self._comm.Abort(code)


@contextmanager
def joined_ranks() -> Generator[Ranks]:
    """The processes of this build. Where one fails, it says why, and all end."""
    ranks = Ranks(_find_comm())
    try:
        yield ranks
    except BaseException as error:
        if ranks.size == 1 or isinstance(error, SystemExit):
            raise
        if isinstance(error, ENDINGS):
            log_line(str(error))
            ranks.abort(error.code)
        traceback.print_exc()
        ranks.abort(1)


def count_started(environ=os.environ) -> int:
    """How many processes a launcher says it has started with this one."""
    # mpirun's own first: what it starts on other nodes inherits the step of its Slurm helpers.
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    if "SLURM_STEP_ID" in environ:
        names.append("SLURM_STEP_NUM_TASKS")
    return next((int(environ[name]) for name in names if name in environ), 1)


def _find_comm():
    """MPI's world; None, without importing MPI, for a process that was started alone."""
    started = count_started()
    if started == 1:
        return None
    require("mpi4py", "mpi", f"{started} processes were started")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{started} processes were started, but MPI cannot be used: {error}"
        ) from None
    if MPI.COMM_WORLD.Get_size() != started:
        raise UserError(
            f"{started} processes were started, but MPI sees {MPI.COMM_WORLD.Get_size()}: each "
            "would do all the work; start them with the mpirun of the MPI that mpi4py uses"
        )
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    return MPI.COMM_WORLD


def _follow(launcher: int) -> None:
    """End with the launcher: an mpirun that is killed outright leaves its processes running."""
    while os.getppid() == launcher:
        time.sleep(POLL_SECONDS)
    os._exit(1)
