"""A tool starts itself once a rank, where no launcher has."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from albert_ds.measure.link import Nodes


def start_ranks(argv: list[str], ranks: int, nodes: Nodes | None = None) -> int:
    """Run this program once a rank on this machine; the first exit code that is not 0.

    `nodes`: machines within this one that the ranks are spread over, neighbours in one of them.
    """
    meeting = nodes.environment() if nodes else _meet_here()
    local_ranks = ranks // (len(nodes.holders) if nodes else 1)
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    started = []
    for rank in range(ranks):
        node, local_rank = divmod(rank, local_ranks)
        command = [sys.executable, sys.argv[0], *argv]
        own = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": ranks}
        started.append(
            subprocess.Popen(
                nodes.command(node, command) if nodes else command,
                env={"OMP_NUM_THREADS": threads, **os.environ, **meeting}
                | {name: str(value) for name, value in own.items()},
            )
        )
    codes = [process.wait() for process in started]
    return next((code for code in codes if code), 0)


def _meet_here() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
