"""The kit for a GPU of some minutes runs its pieces on the fake device, with tiny models."""

import json
import signal
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch
from albert_lab.gpu_check.host import EAGER_TURNS, TURNS
from safetensors.torch import load_file

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


@pytest.mark.timeout(MAX_SECONDS)
def test_minutes_end_with_scored_weights_also_if_the_training_is_cut_off(
    fake_cuda,  # noqa: F811
    data,
    tmp_path,
):
    """The first call only times a step; the second takes far too many of them, and is stopped."""
    given = {"DATA": data, "LENGTH": 64, "PIECES": 800, "QUICK": 1, "PY": sys.executable}
    given |= {"OUT": tmp_path / "out", "WORK": tmp_path / "work", "WORKERS": 1}
    first = run_bash("tools/gpu_kit/minutes.sh", **given, FIRST=1)
    assert first.returncode == 0, first.stdout + first.stderr
    assert (
        "a step of 8 sequences takes" in first.stdout and not (tmp_path / "work" / "run").exists()
    )
    (tmp_path / "work" / "steps").write_text("100000\n")
    given |= {"MINUTES": 60, "SCORES": 1800, "FLAGS": "--save-every 25"}
    run = tmp_path / "work" / "run"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run_bash, "tools/gpu_kit/minutes.sh", **given)
        while not running.done() and not any(run.glob("checkpoints/step-*")):
            sleep(0.2)
        if not running.done():
            (run / "STOP").touch()
        done = running.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the training ended with 75 " in done.stdout and "exported: " in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.tar.00", "results.tar.gz"}
    for name in names:
        with tarfile.open(tmp_path / "out" / name) as file:
            file.extractall(tmp_path / "kept", filter="data")
    kept = tmp_path / "kept"
    assert load_file(kept / "model" / "model.safetensors").popitem()[1].dtype == torch.bfloat16
    probe = json.loads((kept / "scores" / "probe.json").read_text())
    assert probe["weights"] == "model" and probe["heldout_masked"] > 0
    last = json.loads((kept / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 20 <= last["step"] < 100_000


@pytest.mark.timeout(MAX_SECONDS)
def test_the_host_is_measured_with_every_source_and_setting(fake_cuda, data, tmp_path):  # noqa: F811
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data").symlink_to(data)
    given = {"KIT_WORK": f"{tmp_path}/work", "OUT": f"{tmp_path}/out", "QUICK": 1}
    command = ("tools/gpu_kit/run.sh", MAX_SECONDS - 60, "host")
    done = run_bash(*command, **given, PY=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line)).get("kind") == "host"]
    assert [(r["rows"], r["settings"].split(", ")) for r in records] == [
        (source, [*settings] or ["as is"]) for _, source, settings in [*TURNS, *EAGER_TURNS]
    ]
    for record in records:
        measured = record["found"]
        has_none = "gc off" in record["settings"]
        assert measured["host_ms"] <= measured["step_ms_p90"] <= measured["slowest_ms"]
        assert (sum(measured["collections"]) == 0) == (measured["collection_ms"] == 0) >= has_none
        assert measured["torch_threads"] == 1 or "1 thread" not in record["settings"]


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
