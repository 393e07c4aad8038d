"""A slice of `python -m tests.bad_input`."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize(
    "words",
    ["0.05 --only train vocab shards", pytest.param("0.1", marks=pytest.mark.nightly)],
)
def test_no_command_ends_in_a_traceback_a_hang_a_loss_or_silence(tmp_path, words):
    command = [sys.executable, "-m", "tests.bad_input", "--commands", tmp_path / "here", "--share"]
    done = subprocess.run([*command, *words.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 10  # classes
