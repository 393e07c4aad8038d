"""Run a function or a program on several ranks of this machine, one process per rank."""

import atexit
import multiprocessing as mp
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch
from albert_lab.ranks import rank_environment, take_port

# Importing torch, DeepSpeed and megatron-core takes 8 s, so ranks are forked from one process that
# has imported them. A process that has asked for CUDA must not be forked where there is one.
METHOD = "spawn" if torch.cuda.is_available() else "forkserver"


def wait_for(condition: Callable, what: str, timeout: float = 240, explain: Callable = str):
    """Poll until `condition()` is true and return that; AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}\n{explain()}"
        time.sleep(0.02)
    return value


def run_ranks(function: Callable, world_size: int, *args) -> list:
    """Call `function(rank, *args)` in `world_size` processes; return their results by rank.

    Every process gets the environment that a launcher would set. Raises AssertionError with the
    first traceback if a rank fails.
    """
    context = _open_context()
    port = take_port()
    pipes = []
    ranks = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        given = (function, rank, world_size, port, sender, args)
        ranks.append(context.Process(target=_enter, args=given))
        ranks[-1].start()
        sender.close()  # so that the end of the rank is the end of the pipe
        pipes.append(receiver)
    gathered: dict = {}
    while len(gathered) < world_size:
        for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in gathered]):
            rank = pipes.index(pipe)
            try:
                value, failure = pipe.recv()
            except EOFError:
                failure = "it ended without a result"
            if failure is not None:
                for process in ranks:
                    process.terminate()
                raise AssertionError(f"rank {rank} failed:\n{failure}")
            gathered[rank] = pickle.loads(value)
    for process, pipe in zip(ranks, pipes, strict=True):
        process.join()
        pipe.close()
    return [gathered[rank] for rank in range(world_size)]


def end_ranks(function: Callable, world_size: int, *args, timeout: float = 300) -> list[int]:
    """Call `function(rank, *args)` in `world_size` processes; returns their exit codes by rank.

    The function ends its process. Raises AssertionError if one has not ended in `timeout` seconds.
    """
    context, port = _open_context(), take_port()
    ranks = [
        context.Process(target=_end, args=(function, rank, world_size, port, args))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + timeout
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    assert None not in codes, f"a rank hangs: {codes}"
    return codes


class Program:
    """A Python program in a process forked from the server; it is used like `subprocess.Popen`."""

    def __init__(self, argv: list[str], *, cwd: Path, env: dict[str, str]):
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._files = [Path(folder, name) for name in ("stdout", "stderr")]
        given = (argv, str(cwd), env, [str(path) for path in self._files])
        self._process = _open_context().Process(target=_run_program, args=given)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        self._process.join(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return tuple(path.read_text(errors="replace") for path in self._files)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_program(argv: list[str], cwd: str, env: dict[str, str], outputs: list[str]) -> None:
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    mp.set_start_method("fork", force=True)  # as in a program that a user starts
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a forked process leaves out


def _open_context():
    context = mp.get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(["tests.preload"])
    return context


def _end(function, rank, world_size, port, args) -> None:
    _set_environment(rank, world_size, port)
    # Loader workers see that a killed rank is gone only if they are its own children.
    mp.set_start_method("fork", force=True)
    function(rank, *args)


def share_gpus(world_size: int) -> None:
    """NCCL takes one rank a GPU; where there are more, it is gloo over copies on the host."""
    if 0 < torch.cuda.device_count() < world_size and os.environ.get("DS_ACCELERATOR") != "cpu":
        from albert_ds.process import rendezvous
        from tests.staged_gloo import stage

        stage()
        rendezvous.check_kinds = lambda kinds: None  # ranks of a user never share one


def _set_environment(rank, world_size, port) -> None:
    os.environ |= {
        **rank_environment(rank, world_size, rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _enter(function, rank, world_size, port, pipe, args) -> None:
    _set_environment(rank, world_size, port)
    try:
        share_gpus(world_size)
        # Plain pickle: torch's own passes tensors through files that vanish with this process.
        pipe.send((pickle.dumps(function(rank, *args)), None))
    except BaseException:  # the parent fails the test with it
        pipe.send((None, traceback.format_exc()))
