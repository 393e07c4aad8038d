"""A part of `python -m tests.flag_pairs`: pairs of `train`'s flags."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.flag_pairs import VALUES, list_rows


def test_every_two_values_meet():
    met = {
        pair
        for row in list_rows()
        for one in row.items()
        for pair in [(one, o) for o in row.items()]
    }
    cells = [(flag, value) for flag, values in VALUES.items() for value in values]
    assert {(one, other) for one in cells for other in cells if one[0] != other[0]} <= met


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_flags_together_resume_export_and_probe(tmp_path):
    command = [sys.executable, "-m", "tests.flag_pairs", tmp_path / "here", "--rows", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
