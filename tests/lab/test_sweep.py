"""Rows of a file are trained, one that fails stops no other, and the command goes on."""

import csv

import pytest

from albert_ds.base.errors import UserError
from tests.command import run_python
from tests.conftest import train_command
from tools.lab.sweep import read_rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: --x 1\na: --y 2", "line 2: must be `NAME: --FLAG VALUE ...`, once"),
        ("no colon", "line 1: must be"),
        ("a/b: --x 1", "line 1: must be"),
        ("a: --x 'open", "line 1: No closing quotation"),
        ("# nothing", "has no row"),
    ],
)
def test_a_wrong_file_of_rows_is_one_line(text, said, tmp_path):
    file = tmp_path / "rows"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_rows(file)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.nightly
def test_a_row_that_fails_stops_no_other(data, tmp_path):
    rows, output = tmp_path / "rows", tmp_path / "sweep"
    rows.write_text("base:\nwrong: --num-heads 7\n# a comment\nwide: --hidden-size 64\n")
    flags = train_command(data, "run", steps=2, eval_every=2)[2:]
    at = flags.index("--output")
    del flags[at : at + 2]
    words = ("tools/lab/sweep.py", "--rows", rows, "--output", output, "--at-once", 2, "--")
    first = run_python(*words, *flags)
    assert first.returncode == 1 and "wrong, seed 0: code 2" in first.stderr
    records = list(csv.DictReader((output / "rows.csv").read_text().splitlines()))
    assert [(row["row"], row["code"]) for row in records] == [
        ("base", "0"), ("wrong", "2"), ("wide", "0"),
    ]  # fmt: skip
    assert all(float(row["heldout_mlm_loss"]) > 0 for row in records if row["code"] == "0")
    rows.write_text("base:\nwrong: --num-heads 2\nwide: --hidden-size 64\n")
    again = run_python(*words, *flags)
    assert again.returncode == 0 and again.stderr.count(": begins") == 1, again.stderr
