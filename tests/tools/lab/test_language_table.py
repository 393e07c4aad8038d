"""The table of docs/languages.md has a row for each language that is asked for."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.data.corpus import SHARED


def test_a_row_of_real_text():
    pytest.importorskip("transformers")
    if not (SHARED / "languages.tar.xz").is_file():
        pytest.skip(f"no real text in {SHARED}")
    command = [sys.executable, "tools/lab/language_table.py", "--text", SHARED]
    done = subprocess.run(
        [*map(str, command), "--languages", "th", "--vocab-size", "500"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    header, _, row = ([c.strip() for c in line.split("|")] for line in done.stdout.splitlines())
    found = dict(zip(header, row, strict=True))
    assert found["language"] == "th (500 pieces)" and found["script"] == "Thai"
    assert found["words merged"] == "0.00%" and found["pieces a word"] == "no spaces"
    assert float(found["unknown tokens"].rstrip("%")) <= 0.1
    assert found["ids equal to Hugging Face"] == "2,000 of 2,000"
