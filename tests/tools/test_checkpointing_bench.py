"""The bench takes turns among the modes and reports each one's memory and steps."""

import json
import subprocess
import sys

from tests.conftest import ROOT


def test_every_mode_is_measured_in_turn(tmp_path):
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "tools/checkpointing_bench.py", "--model", "albert-tiny"),
        *("--num-layers", "8", "--micro-batch-size", "4", "--sequence-length", "256"),
        *("--rounds", "1", "--output", report),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(report.read_text())
    assert list(measured) == ["none", "attention", "block"]
    for mode, values in measured.items():
        assert f"| {mode} |" in done.stdout
        assert len(values["step_seconds"]) == 1 and min(values["step_seconds"]) > 0
    # What is not kept is not held: the one thing the flag is for.
    assert measured["block"]["peak_bytes"] < measured["none"]["peak_bytes"]
