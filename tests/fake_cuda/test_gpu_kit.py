"""The kit for a GPU of some minutes runs all its stages on the fake device, with tiny models."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.fake_cuda.__main__ import environment
from tests.fake_cuda.build import find_compiler

STAGES = {"probe", "smoke", "speed", "train", "resume", "exact", "peer", "rates"}
MAX_SECONDS = 3000


@pytest.mark.nightly
@pytest.mark.timeout(MAX_SECONDS)
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA's own operators")
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_every_stage_passes_and_is_in_the_report(data, tmp_path):
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
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {r["name"] for r in records if r["kind"] == "stage" and r.get("ok")} == STAGES
    assert [r for r in records if r.get("ok") is False] == []
    assert [r for r in records if r["kind"] == "left out"] == []
    report = (tmp_path / "out" / "report.md").read_text()
    assert all(f"PASS {stage}" in report for stage in STAGES)
    assert "| albert-tiny | 2 | plain |" in report
