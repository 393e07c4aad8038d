"""The processes that do the pieces of a build: MPI's, some of this machine, or this one alone.

One process reads the command line and hands out the pieces; the others only work. What they are
given and what they return is small: text and sequences go over the disk.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import closing, contextmanager
from typing import TypeVar

from albert_ds.base.cli import require
from albert_ds.base.errors import MachineFailed, UserError

Result = TypeVar("Result")
POLL_SECONDS = 0.5


class Pool:
    """`map` of the builtins, by the processes of an executor if there is one."""

    def __init__(self, executor: Executor | None = None):
        self._executor = executor

    def start(self, processes: int) -> None:
        """Start processes on this machine. Raises UserError if MPI has started some already."""
        if processes == 1:
            return
        if self._executor:
            raise UserError(f"--processes {processes}: mpirun has started the processes already")
        # A forked process would share locks that a thread of this one may hold.
        fresh = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(
            processes, fresh, initializer=_work_for_parent, initargs=(os.getpid(),)
        )

    def map(self, work: Callable[..., Result], *items: Iterable) -> Iterator[Result]:
        """The results in the order of the items. The first error of `work` ends it.

        `work`, items and results are pickled. Raises MachineFailed if a process was killed.
        """
        if not self._executor:
            yield from map(work, *items)
            return
        try:
            yield from self._executor.map(work, *items)
        except BrokenExecutor:
            raise MachineFailed(
                "a process of the build was killed, perhaps for lack of memory; finished work is "
                "kept, and the same command continues"
            ) from None

    def close(self) -> None:
        if self._executor:
            self._executor.shutdown(cancel_futures=True)


@contextmanager
def open_pool() -> Generator[Pool | None]:
    """The pool of this process; None in a process that has worked for the first one of MPI's.

    Raises UserError if MPI cannot join the processes that a launcher has started.
    """
    started = count_started()
    if started == 1:
        with closing(Pool()) as pool:
            yield pool
        return
    require("mpi4py", "mpi", f"{started} processes were started")
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{started} processes were started, but MPI cannot be used: {error}"
        ) from None
    if MPI.COMM_WORLD.Get_size() != started:
        raise UserError(
            f"{started} processes were started, but MPI sees {MPI.COMM_WORLD.Get_size()}: each "
            "would do all the work; start them with the mpirun of the MPI that mpi4py uses"
        )
    end_with(os.getppid())
    with MPICommExecutor(MPI.COMM_WORLD) as executor:
        yield Pool(executor) if executor is not None else None  # ty: ignore[invalid-argument-type]


def count_started(environ=os.environ) -> int:
    """How many processes a launcher says it has started with this one."""
    # mpirun's own first: what it starts on other nodes inherits the step of its Slurm helpers.
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    if "SLURM_STEP_ID" in environ:
        names.append("SLURM_STEP_NUM_TASKS")
    return next((int(environ[name]) for name in names if name in environ), 1)


def _work_for_parent(parent: int) -> None:
    """In a new process of this machine: Ctrl-C and the end of the parent end it, without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with(parent)


def end_with(parent: int) -> None:
    """End when `parent`, which started this process, is gone: if it is killed, it ends nobody else.

    It may be gone already: another process is the parent then.
    """

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
