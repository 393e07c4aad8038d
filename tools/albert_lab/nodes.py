"""Nodes with a network of a given speed between them, on one machine; and the ranks on them.

A node is a network namespace of Linux. It holds one end of a veth pair; the other ends meet at a
bridge in a namespace of its own. A token bucket (tc's tbf) limits the rate at which a node sends.
Ranks of one node reach each other without the limit, as on a real node.

Nothing needs cleaning up: a namespace lasts as long as a process in it, and each is held by a `cat`
that ends when its input closes. If this process ends, even by kill -9, the kernel ends the ranks
(setpriv --pdeathsig), the namespaces and the links.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from albert_ds.errors import UserError

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
INTERFACE = "albert0"  # no host has this name, so ranks never limit the host's own interface
SUBNET = "10.77.0"
PORT = 29400
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
# Much smaller than the gradients of a step. A quarter of it would halve the rate.
BURST = "256kb"


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate of a link in tc's spelling, such as 100mbit."""

    text: str

    @property
    def bits_per_second(self) -> float:
        number, unit = re.fullmatch(r"([\d.]+)([kmg]bit)", self.text).groups()  # ty: ignore
        return float(number) * UNITS[unit]


def parse_rate(text: str) -> Rate | None:
    """None for `none`, a link without a limit. Raises ValueError for a rate that tc refuses."""
    if text == "none":
        return None
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", text) or not float(text[:-4]):
        raise ValueError(text)
    return Rate(text)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Namespaces that exist, by the processes that hold them."""

    holders: list[int]

    def command(self, node: int, argv: list[str]) -> list[str]:
        """The command that runs `argv` inside a node; it ends when its parent ends."""
        return [*_inside(self.holders[node]), "setpriv", "--pdeathsig", "KILL", *argv]

    def environment(self) -> dict[str, str]:
        """Environment variables with which ranks find each other across the links."""
        return {
            "MASTER_ADDR": f"{SUBNET}.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }


@contextmanager
def open_nodes(count: int) -> Generator[Nodes]:
    """Create `count` nodes; their links have no limit yet. Raises UserError where impossible."""
    check_nodes(count)
    holders: list[subprocess.Popen] = []
    try:
        for _ in range(1 + count):
            command = ["unshare", "--net", "cat"]
            holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=_environ()))
        switch, *nodes = [_wait_until_apart(holder) for holder in holders]
        _run(switch, "ip link add bridge0 type bridge")
        _run(switch, "ip link set bridge0 up")
        for number, node in enumerate(nodes, start=1):
            _run(switch, f"ip link add v{number} type veth peer name {INTERFACE} netns {node}")
            _run(switch, f"ip link set v{number} master bridge0 up")
            _run(node, f"ip addr add {SUBNET}.{number}/24 dev {INTERFACE}")
            _run(node, "ip link set lo up")
            _run(node, f"ip link set {INTERFACE} up")
        yield Nodes(nodes)
    finally:
        for holder in holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait()


def check_nodes(count: int) -> None:
    """Raise UserError where this machine or this user cannot create nodes."""
    path = _environ()["PATH"]
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        raise UserError(
            f"--nodes {count}: {', '.join(missing)} not installed; allowed: Linux with iproute2 "
            "and util-linux"
        )
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, env=_environ())
    if tried.returncode:
        raise UserError(f"--nodes {count}: network namespaces need root; user id {os.getuid()}")


def shape(rate: Rate | None, before: Rate | None) -> None:
    """Limit the link of this process's node to `rate`. Called by one rank of each node."""
    if rate is not None:
        bucket = f"tbf rate {rate.text} burst {BURST} latency 50ms"
        _tc(f"tc qdisc replace dev {INTERFACE} root {bucket}")
    elif before is not None:
        _tc(f"tc qdisc del dev {INTERFACE} root")


def is_in_node() -> bool:
    return INTERFACE in psutil.net_io_counters(pernic=True)


def read_sent_bytes() -> int:
    """Bytes that this node's link has sent since it exists, with headers."""
    return psutil.net_io_counters(pernic=True)[INTERFACE].bytes_sent


def start_ranks(ranks: int, *more: str, nodes: Nodes | None = None) -> int:
    """Start this program once per rank on this machine; returns the first exit code above 0.

    more: flags that each rank gets after those of this process. nodes: the namespaces that the
    ranks are spread over, consecutive ranks on one node.
    """
    meeting = nodes.environment() if nodes else find_port()
    local_ranks = ranks // (len(nodes.holders) if nodes else 1)
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    started = []
    for rank in range(ranks):
        node, local_rank = divmod(rank, local_ranks)
        command = [sys.executable, *sys.orig_argv[1:], *more]
        environ = {"OMP_NUM_THREADS": threads, **os.environ, **meeting}
        environ |= rank_environment(rank, ranks, local_rank)
        started.append(
            subprocess.Popen(nodes.command(node, command) if nodes else command, env=environ)
        )
    codes = [process.wait() for process in started]
    return next((code for code in codes if code), 0)


def rank_environment(rank: int, ranks: int, local_rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(ranks)}


def find_port() -> dict[str, str]:
    """Environment variables with which ranks of this machine find each other, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def _wait_until_apart(holder: subprocess.Popen) -> int:
    mine, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
    while os.readlink(f"/proc/{holder.pid}/ns/net") == mine:
        assert time.monotonic() < deadline and holder.poll() is None, "unshare --net did not come"
        time.sleep(0.01)
    return holder.pid


def _inside(holder: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{holder}/ns/net"]


def _run(holder: int, command: str) -> None:
    _tc(" ".join([*_inside(holder), command]))


def _tc(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, env=_environ())
    if done.returncode:
        raise UserError(f"--link: `{command}` failed: {done.stderr.strip()}")


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
