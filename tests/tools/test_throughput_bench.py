"""The bench starts its own ranks, steps real engines and reports what a step moved."""

import json
import subprocess
import sys

from tests.conftest import ROOT


def bench(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "tools/throughput_bench.py", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_two_models_on_two_ranks(tmp_path):
    report = tmp_path / "report.json"
    done = bench(
        *("--models", "bert-base", "albert-base", "--ranks", "2", "--rounds", "2"),
        *("--micro-batch-size", "1", "--sequence-length", "16", "--vocab-size", "50"),
        *("--warmup", "0", "--output", str(report)),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "| bert-base |" in done.stdout and "| albert-base |" in done.stdout
    measured = json.loads(report.read_text())
    assert measured["ranks"] == 2
    for model in measured["models"].values():
        assert len(model["rounds"]) == 2
        gradients = 4 * model["parameters"]  # fp32, each unique parameter once
        for turn in model["rounds"]:
            assert gradients <= turn["bytes_a_step"]["all_reduce"] <= 1.01 * gradients
            assert turn["samples_a_second"] > 0
    sizes = [model["parameters"] for model in measured["models"].values()]
    assert sizes[0] > 10 * sizes[1]  # what sharing saves


def test_wrong_input_is_one_line_and_code_2():
    done = bench("--models", "albert-huge")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "albert-huge" in done.stderr
