"""tools/lab/babylm_check.py with a stand-in for the challenge's program, which prints its form."""

import json

import pytest

from tests.command import run_python
from tests.conftest import ROOT

GOOD, BAD = "These books are old.", "These books is old."
PAIRS = {"one": (GOOD, BAD), "two": (BAD, GOOD)}  # as the model of the repository judges them
PROGRAM = """
import sys
assert sys.argv[1:5] == ["--task", "blimp", "--backend", "mlm"]
print("### FIELD ACCURACY", "syntax: 75.00", "", sep="\\n")
print("### UID ACCURACY", "one: 100.00", "two: SHARE", "", "### AVERAGE ACCURACY", sep="\\n")
"""


@pytest.mark.parametrize(("share", "says"), [("0.00", "0 differ"), ("100.00", "1 differ")])
def test_what_the_challenges_program_prints_is_compared(tmp_path, share, says):
    program = tmp_path / "strict/evaluation_pipeline/sentence_zero_shot/run.py"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM.replace("SHARE", share))
    (tmp_path / "pairs").mkdir()
    for name, (good, bad) in PAIRS.items():
        pair = {"sentence_good": good, "sentence_bad": bad, "UID": name}
        line = json.dumps(pair | {"linguistics_term": "agreement"}) + "\n"
        (tmp_path / "pairs" / f"{name}.jsonl").write_text(line)
    flags = ("--harness", tmp_path / "strict", "--minimal-pairs", tmp_path / "pairs")
    check = ROOT / "tools/lab/babylm_check.py"
    done = run_python(check, *flags, "--checkpoint", ROOT / "tools/demo/model")
    assert done.returncode == (says[0] != "0"), done.stderr
    assert f"2 pairs, 2 paradigms, {says}" in done.stdout
    assert ("| two | 0.00 | 100.00 |" in done.stdout) == (says[0] != "0")
