"""Nodes joined by links: the bytes recorded really cross them, and nothing of them is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from albert_lab.nodes import check_nodes, parse_rate

from albert_ds.errors import UserError
from tests.conftest import ROOT

HELD = """
import subprocess, sys, time
from albert_lab.nodes import open_nodes
with open_nodes(2) as nodes:
    inside = [subprocess.Popen(nodes.command(node, ["sleep", "600"])) for node in (0, 1)]
    time.sleep(0.5)
    print(*nodes.holders, *(process.pid for process in inside), flush=True)
    {then}
"""


@pytest.fixture
def nodes():
    try:
        check_nodes(2)
    except UserError as error:
        pytest.skip(str(error))


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["return", "raise", "kill -9"])
def test_nothing_is_left_however_it_ends(nodes, end):
    before = interfaces()
    then = {"return": "", "raise": "raise SystemExit(1)", "kill -9": "time.sleep(600)"}[end]
    command = [sys.executable, "-c", HELD.format(then=then)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as held:
        pids = [int(word) for word in held.stdout.readline().split()]
        assert len(pids) == 4 and interfaces() == before  # nothing has a name out here
        if end == "kill -9":
            assert all(map(psutil.pid_exists, pids))
            held.send_signal(signal.SIGKILL)
    wait_until_gone(pids)
    assert interfaces() == before


def test_recorded_bytes_cross_the_link_and_take_as_long_as_it_needs(nodes, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "tools/throughput_bench.py", "--models", "albert-tiny"]
    command += ["--ranks", "2", "--nodes", "2", "--link", "none,100mbit", "--rounds", "1"]
    command += ["--micro-batch", "1", "--sequence-length", "16", "--output", str(report)]
    command += ["--deepspeed_config", "ds_configs/zero0_fp32.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    free, slow = json.loads(report.read_text())["cells"]
    assert (free["link"], slow["link"], slow["nodes"]) == (None, "100mbit", 2)
    for cell in (free, slow):
        (turn,) = cell["rounds"]
        # Gradients in fp32, in a ring of two.
        assert turn["wire_bytes_a_step"] == pytest.approx(4 * cell["parameters"], rel=0.02)
        assert turn["link_bytes_a_step"] == pytest.approx(turn["wire_bytes_a_step"], rel=0.03)
    (turn,) = slow["rounds"]
    least = 8 * turn["wire_bytes_a_step"] / slow["link_bits_per_second"]
    assert turn["communication_seconds"] >= 0.9 * least  # a bucketful goes at once


def test_without_root_one_line_says_so():
    script = (
        "import os, sys\n"
        "from albert_ds.errors import UserError\n"
        "from albert_lab.nodes import check_nodes\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: check_nodes(2)\n"
        "except UserError as error: sys.exit(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and line.startswith("--nodes 2: ")


@pytest.mark.parametrize("text", ["", "fast", "1", "0mbit", "-1mbit", "1gbit; rm", "1 gbit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError):
        parse_rate(text)


def test_rates():
    assert parse_rate("none") is None
    assert [parse_rate(text).bits_per_second for text in ("1gbit", "2.5mbit")] == [1e9, 2.5e6]


def test_a_host_of_its_own_is_never_shaped():
    """Ranks of a launcher would shape the machine's own network."""
    environ = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "tools/throughput_bench.py", "--models", "albert-tiny"]
    command += ["--nodes", "2", "--link", "1gbit"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert done.returncode == 2 and "launcher" in done.stderr
