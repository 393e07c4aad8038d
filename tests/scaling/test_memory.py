"""Predicted memory against the bytes that tensors were seen to take in real steps."""

import json
import subprocess
import sys

from tests.conftest import ROOT


def test_the_fullest_moment_is_predicted(tmp_path):
    report = tmp_path / "report.json"
    flags = [
        *("--models", "albert-tiny", "--micro-batch-size", "4", "--sequence-length", "128"),
        *("--activation-checkpointing", "none", "block", "--ranks", "2"),
        *("--deepspeed_config", "ds_configs/zero1_fp32.json"),
    ]
    done = subprocess.run(
        [sys.executable, "tools/memory_bench.py", *flags, "--output", report],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cells = json.loads(report.read_text())
    assert len(cells) == 2 and done.stdout.count("| albert-tiny |") == 2
    for cell in cells:
        assert abs(cell["error"]) < 0.1, cell
        measured, predicted = cell["measured"], cell["predicted"]
        assert abs(predicted["lives"] / measured["lives"] - 1) < 0.01, cell
    keeps, again = (cell["measured"]["peak"] for cell in cells)
    assert keeps > again
