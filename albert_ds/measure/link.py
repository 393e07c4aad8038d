"""Nodes with a network of a given speed between them, on one machine.

A node is a network namespace of Linux. It holds one end of a veth pair, the other ends meet at a
bridge in a namespace of its own, and a token bucket (tc's tbf) gives what a node sends a rate.
Ranks of one node reach one another without it, as on a real one.

Nothing here has a name outside, so nothing is left behind: a namespace lasts as long as a process
in it, and ours are `cat`s that end when their input does. However this process ends, kill -9
included, the kernel takes the ranks (they die with their parent), the namespaces and the links.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from albert_ds.errors import UserError

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
INTERFACE = "albert0"  # a name no machine has: ranks shape this one and never the host's own
SUBNET = "10.77.0"
PORT = 29400
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
# Small enough to be nothing beside a step's gradients; a quarter of it halves the rate.
BURST = "256kb"


@dataclass(frozen=True, slots=True)
class Rate:
    """What a link carries: tc's spelling, such as 100mbit."""

    text: str

    @property
    def bits_per_second(self) -> float:
        number, unit = re.fullmatch(r"([\d.]+)([kmg]bit)", self.text).groups()  # ty: ignore
        return float(number) * UNITS[unit]


def parse_rate(text: str) -> Rate | None:
    """`none` is a link without a limit. Raises ValueError for what tc would not take."""
    if text == "none":
        return None
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", text) or not float(text[:-4]):
        raise ValueError(text)
    return Rate(text)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Namespaces that are up, by the processes that hold them."""

    holders: list[int]

    def command(self, node: int, argv: list[str]) -> list[str]:
        """`argv` inside a node; it dies with the process that starts it."""
        return [*_inside(self.holders[node]), "setpriv", "--pdeathsig", "KILL", *argv]

    def environment(self) -> dict[str, str]:
        """What ranks must be told so that they meet across the links."""
        return {
            "MASTER_ADDR": f"{SUBNET}.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }


@contextmanager
def open_nodes(count: int) -> Generator[Nodes]:
    """Bring up `count` nodes whose links have no limit yet. UserError where that cannot be."""
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
    """Raise UserError where this machine or this user cannot have nodes."""
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
    """Give the link of the node that this process is in a rate. One rank of a node does it."""
    if rate is not None:
        bucket = f"tbf rate {rate.text} burst {BURST} latency 50ms"
        _tc(f"tc qdisc replace dev {INTERFACE} root {bucket}")
    elif before is not None:
        _tc(f"tc qdisc del dev {INTERFACE} root")


def is_in_node() -> bool:
    return INTERFACE in _counters()


def read_sent_bytes() -> int:
    """Bytes that this node's link has carried outward since it is up: headers and all."""
    return int(_counters()[INTERFACE][8])


def _counters() -> dict[str, list[str]]:
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    names, numbers = zip(*(line.split(":") for line in lines), strict=True)
    return {name.strip(): row.split() for name, row in zip(names, numbers, strict=True)}


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
