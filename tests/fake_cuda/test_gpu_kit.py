"""The kit for a GPU of some minutes runs its pieces on the fake device, with tiny models."""

import json
import signal
import sys

import pytest

from tests.command import run_bash
from tests.fake_cuda.test_fake_cuda import fake_cuda  # noqa: F401 (a fixture)

PIECES = {"machine", "smoke", "speed", "rates", "train", "peer", "resume", "exactness"}
MAX_SECONDS = 3000


@pytest.mark.timeout(MAX_SECONDS)
def test_every_piece_passes_and_is_in_the_report(fake_cuda, data, tmp_path):  # noqa: F811
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data").symlink_to(data)
    given = {"KIT_WORK": f"{tmp_path}/work", "OUT": f"{tmp_path}/out", "QUICK": 1}
    done = run_bash("tools/gpu_kit/run.sh", MAX_SECONDS - 60, **given, PY=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {"results.jsonl", "report.md", "log.txt.gz", "loss.jsonl", "cells.tar.gz"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {r["cell"].split("/")[0] for r in records if r.get("code") == 0} == PIECES
    assert [r for r in records if r.get("ok") is False or r.get("passed") is False] == []
    assert [r for r in records if "left out" in r.get("error", r.get("says", ""))] == []
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.startswith("# PASS: fake H200")
    assert all(f"\n## {piece}\n" in report for piece in PIECES)
    speed = "| speed, size albert-tiny, micro 2, checkpointing none, rows {} | PASS |"
    assert speed.format("random") in report and speed.format("text") in report
    losses = (tmp_path / "out" / "loss.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in losses][-1] == 12


CUT = """#!/bin/bash
[[ $* = *gpu-check* ]] || exit 0
shift 4; mkdir "$1/cells"; echo known > "$1/report.md"; echo {} > "$1/results.jsonl"
for _ in {1..600}; do ls "$OUT"/{report.md,cells.tar.gz} && break; sleep 0.1; done
kill -KILL $PPID
"""


def test_a_run_that_is_cut_off_leaves_what_was_known(tmp_path):
    (tmp_path / "work" / "data").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text(CUT)
    python.chmod(0o755)
    given = {"KIT_WORK": f"{tmp_path}/work", "OUT": f"{tmp_path}/out", "PY": python}
    assert run_bash("tools/gpu_kit/run.sh", 60, **given).returncode == -signal.SIGKILL
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"report.md", "results.jsonl", "cells.tar.gz", "log.txt"}
