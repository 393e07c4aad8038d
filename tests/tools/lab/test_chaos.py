"""A run that is killed at random moments ends with the weights of one that is not."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.nightly
def test_a_killed_run_equals_one_left_alone(data, tmp_path):
    # Seed 6 kills while starting, stepping and saving; one rank and both.
    command = ["tools/lab/chaos.py", "--data", data, "--output", tmp_path / "runs"]
    done = subprocess.run(
        [sys.executable, *map(str, command), "--kills", "4", "--seed", "6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()  # one more for each start that a busy machine made too slow
    assert len([line for line in lines if line.startswith("kill ")]) == 4
    assert lines[-1].endswith("are equal bit for bit")


def test_the_short_form_covers_every_moment():
    from tools.lab.chaos import plan_kills

    kills = plan_kills(4, 24, 2, 6)
    assert {kill.moment for kill in kills} == {"starting", "stepping", "saving"}
    assert {len(kill.victims) for kill in kills} == {1, 2}


def test_a_difference_is_seen(tmp_path):
    from tools.lab.chaos import compare

    for run, content in (("alone", b"1"), ("killed", b"1")):
        folder = tmp_path / run / "checkpoints" / "step-00000001"
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").write_bytes(content)
        (folder.parent / "latest").write_text("step-00000001\n")
    assert compare(tmp_path / "alone", tmp_path / "killed") == []
    (folder / "weights.safetensors").write_bytes(b"2")
    assert compare(tmp_path / "alone", tmp_path / "killed") == ["weights.safetensors"]
