"""The commands fit, predict and plan, and the picture of the predictions."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.lab.scaling.bench import write_report


def ask(*flags) -> subprocess.CompletedProcess:
    command = [sys.executable, "tools/scaling_model.py", *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_from_measurements_to_a_plan_and_a_picture(tmp_path):
    bench, constants = write_report(tmp_path / "bench.json"), tmp_path / "constants.json"
    memory = tmp_path / "memory.json"
    memory.write_text(json.dumps([{"error": 0.02}, {"error": -0.04}]))
    done = ask(
        *("fit", "--input", bench, "--hold-out", "model=albert-large,link=1gbit,ranks=4"),
        *("--memory", memory, "--output", constants),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("held back: ") == 3
    report = json.loads(constants.read_text())
    assert report["memory"] == {"cells": 2, "mean": 0.03, "largest": 0.04}
    assert {cell["held_back"] for cell in report["cells"]} == {True, False}

    cluster = ("--gpus", "64", "--gpu-memory", "40", "--link", "25", "--steps", "1000")
    done = ask("plan", "--model", "albert-large", *cluster, "--constants", constants)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "4% at most" in done.stdout and "ds_configs/zero1_bf16.json" in done.stdout
    assert done.stdout.startswith("PREDICTED")

    predictions, picture = tmp_path / "predictions.json", tmp_path / "scaling.png"
    clusters = ("--gpus", "8", "64", "512", "--overlap", "0", "1")
    done = ask("predict", *clusters, "--output", predictions)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(predictions.read_text())["rows"]
    assert len(rows) == 5 * 3 * 5 * 2  # models, GPUs, links, overlaps

    def speed_up(link):
        found = {(r["model"], r["gpus"], r["link_gbits"], r["overlap"]): r for r in rows}
        return found["albert-large", 64, link, 0]["speed_up"]

    # The less a link carries the more sharing matters; on the fastest it is no more than FLOPs.
    assert speed_up(10) > speed_up(100) > speed_up(3200) > 1
    command = [sys.executable, "tools/plots.py", "scaling", "--input", predictions]
    subprocess.run([*command, "--output", picture], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("predict", "--gpus", "12"), "--gpus 12"),
        (("predict", "--mfu", "1.5"), "--mfu 1.5"),
        (("fit", "--input", "absent.json"), "absent.json"),
        (
            *(("plan", "--model", "albert-base", "--gpus", "8", "--gpu-memory", "0"),),
            "--gpu-memory 0",
        ),
    ],
)
def test_wrong_input_is_one_line_and_code_2(tmp_path, flags, says):
    more = ("--link", "10", "--steps", "1", "--constants", "absent") if flags[0] == "plan" else ()
    done = ask(*flags, *more)
    assert done.returncode == 2 and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
