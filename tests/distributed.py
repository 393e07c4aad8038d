"""Run a function on several ranks of this machine, one process per rank."""

import multiprocessing as mp
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# Importing torch, DeepSpeed and megatron-core takes 8 s, so ranks are forked from one process that
# has imported them. A process that has initialised CUDA must not be forked.
METHOD = "spawn" if Path("/dev/nvidiactl").exists() else "forkserver"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(function: Callable, world_size: int, *args) -> list:
    """Call `function(rank, *args)` in `world_size` processes; return their results by rank.

    Every process gets the environment that a launcher would set. Raises AssertionError with the
    first traceback if a rank fails.
    """
    context = _open_context()
    results = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=_enter, args=(function, rank, world_size, port, results, args))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    gathered: dict = {}
    while len(gathered) < world_size:
        rank, value, failure = results.get()
        if failure is not None:
            for process in ranks:
                process.terminate()
            raise AssertionError(f"rank {rank} failed:\n{failure}")
        gathered[rank] = pickle.loads(value)
    for process in ranks:
        process.join()
    return [gathered[rank] for rank in range(world_size)]


def end_ranks(function: Callable, world_size: int, *args, timeout: float = 60) -> list[int]:
    """Call `function(rank, *args)` in `world_size` processes; returns their exit codes by rank.

    The function ends its process. Raises AssertionError where one has not ended in `timeout`
    seconds.
    """
    context = _open_context()
    port = free_port()
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


def _open_context():
    context = mp.get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(["tests.preload"])
    return context


def _end(function, rank, world_size, port, args) -> None:
    _set_environment(rank, world_size, port)
    function(rank, *args)


def share_gpus(world_size: int) -> None:
    """NCCL takes one rank a GPU; where there are more, it is gloo over copies on the host."""
    import torch

    if 0 < torch.cuda.device_count() < world_size and os.environ.get("DS_ACCELERATOR") != "cpu":
        from albert_ds.process import rendezvous
        from tests.staged_gloo import stage

        stage()
        rendezvous.check_kinds = lambda kinds: None  # ranks of a user never share one


def _set_environment(rank, world_size, port) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _enter(function, rank, world_size, port, results, args) -> None:
    _set_environment(rank, world_size, port)
    try:
        share_gpus(world_size)
        # Plain pickle: torch's own passes tensors through files that vanish with this process.
        results.put((rank, pickle.dumps(function(rank, *args)), None))
    except BaseException:  # the parent fails the test with it
        results.put((rank, None, traceback.format_exc()))
