"""A part of `python -m tests.flag_pairs`: pairs of `train`'s flags."""

import subprocess
import sys
from itertools import combinations

import pytest

from tests.conftest import ROOT
from tests.flag_pairs import VALUES, is_allowed, list_rows


def test_every_two_values_meet():
    """But those that are refused together."""
    met = {pair for row in list_rows() for pair in combinations(row.items(), 2)}
    plain = {flag: values[0] for flag, values in VALUES.items()}
    cells = [(flag, value) for flag, values in VALUES.items() for value in values]
    for one, other in combinations(cells, 2):
        if one[0] != other[0] and (one, other) not in met:
            assert not is_allowed(plain | dict([one, other])), (one, other)
    assert is_allowed(plain) and len(met) > 1500


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_flags_together_resume_export_and_probe(tmp_path):
    command = [sys.executable, "-m", "tests.flag_pairs", tmp_path / "here", "--rows", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
