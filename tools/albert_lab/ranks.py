"""Ranks of a program on this machine, started without a launcher."""

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping

from albert_ds.base.errors import UserError
from albert_ds.process.quiet import quiet_libraries
from albert_ds.process.world import World, read_world
from albert_ds.text.pool import end_with

MOST = 64  # or the number of cores: a rank is a process of its own


def enter_world() -> World:
    """The ranks that a launcher started, or this process alone: a rank ends with its launcher."""
    world = read_world()
    if world.launcher != "none":
        end_with(os.getppid())
    quiet_libraries()
    return world


def start_ranks(ranks: int, flags: Mapping[str, str] | None = None) -> int:
    """Start this program once per rank on this machine; returns the first exit code above 0.

    flags: of one value each, which the ranks get in place of those that were typed.
    Raises UserError if they are too many for any machine.
    """
    check_ranks(ranks)
    meeting = find_port()
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    command = [sys.executable, *replace_flags(sys.orig_argv[1:], flags or {})]
    started = []
    for rank in range(ranks):
        environ = {"OMP_NUM_THREADS": threads, **os.environ, **meeting}
        environ |= rank_environment(rank, ranks, rank)
        started.append(subprocess.Popen(command, env=environ))
    codes = [process.wait() for process in started]
    return next((code for code in codes if code), 0)


def replace_flags(words: Iterable[str], flags: Mapping[str, str]) -> list[str]:
    """The words of a command with these flags instead of its own: a list typed twice adds up."""
    kept = []
    left = iter(words)
    for word in left:
        name, has_value, _ = word.partition("=")
        if name not in flags:
            kept.append(word)
        elif not has_value:
            next(left)
    return [*kept, *(word for pair in flags.items() for word in pair)]


def check_ranks(ranks: int) -> None:
    """Raise UserError if they are too many for any machine."""
    if ranks > (most := max(MOST, os.cpu_count() or 1)):
        raise UserError(f"--ranks {ranks}: at most {most} processes on this machine")


def rank_environment(rank: int, ranks: int, local_rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(ranks)}


def find_port() -> dict[str, str]:
    """Environment variables with which ranks of this machine find each other, on a free port."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(take_port())}


def take_port() -> int:
    """A port that nobody else is given while this process lives.

    It is bound and nobody listens on it yet, so the store of ranks can.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    atexit.register(held.close)
    return held.getsockname()[1]
