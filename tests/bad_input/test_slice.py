"""A slice of `python -m tests.bad_input`; the whole of it in the nightly run."""

import subprocess
import sys

import pytest

from tests.bad_input.__main__ import CLASSES, build_data, try_all
from tests.bad_input.judge import AS_PROMISED, TRACEBACK, WRONG, Case, judge, must_refuse
from tests.conftest import ROOT


@pytest.mark.parametrize("share", [0.25, pytest.param(1.0, marks=pytest.mark.nightly)])
def test_no_wrong_input_ends_in_a_traceback_a_hang_or_silence(tmp_path, share):
    (tmp_path / "work").mkdir()
    tried = list(try_all(tmp_path / "work", build_data(tmp_path), share))
    assert not [case for case in tried if case[2] != AS_PROMISED]
    assert {name for name, *_ in tried} > CLASSES.keys()
    # The judge sees a crash, and silence where input is wrong beyond doubt.
    assert judge(Case("", lambda: {}["key"]))[0] == TRACEBACK
    assert judge(Case("", must_refuse(lambda: 3)))[0] == WRONG


@pytest.mark.parametrize(
    "words",
    ["0.05 --only train vocab shards", pytest.param("0.1", marks=pytest.mark.nightly)],
)
def test_no_command_ends_in_a_traceback_a_hang_a_loss_or_silence(tmp_path, words):
    command = [sys.executable, "-m", "tests.bad_input", "--commands", tmp_path / "here", "--share"]
    done = subprocess.run([*command, *words.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 10  # classes
