"""The kit for a GPU of some minutes runs its pieces on the fake device, with tiny models."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.fake_cuda.__main__ import environment
from tests.fake_cuda.build import find_compiler

PIECES = {"machine", "smoke", "speed", "rates", "train", "peer", "resume", "exactness"}
MAX_SECONDS = 3000


@pytest.mark.nightly
@pytest.mark.timeout(MAX_SECONDS)
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA's own operators")
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_every_piece_passes_and_is_in_the_report(data, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data").symlink_to(data)
    folders = {"KIT_WORK": f"{tmp_path}/work", "OUT": f"{tmp_path}/out"}
    done = subprocess.run(
        ["bash", "tools/gpu_kit/run.sh", str(MAX_SECONDS - 60)],
        cwd=ROOT,
        env={**os.environ, **environment(), **folders, "QUICK": "1", "PY": sys.executable},
        capture_output=True,
        text=True,
    )
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
