"""A reader is asked without the labels, and scored by them."""

import json

import pytest

from albert_ds.errors import UserError
from tools.lab.order_reader import main

PAIRS = 12


@pytest.fixture
def ask(data, tmp_path):
    """Run the command on the small shards; the first argument is a flag, the second its file."""

    def run(flag: str, name: str, *more: str) -> None:
        main(["--data", str(data), "--pairs", str(PAIRS), flag, str(tmp_path / name), *more])

    return run


def write_answers(path, orders, sure=True) -> None:
    lines = [{"pair": n, "order": order, "sure": sure} for n, order in enumerate(orders)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in reversed(lines)))


def test_what_is_asked_stands_in_the_text_in_the_order_that_counts_as_right(
    text_file, ask, tmp_path
):
    """Nothing is masked. Pairs that were cut where they meet are in the text in no order."""
    ask("--ask", "pairs.txt")
    asked = (tmp_path / "pairs.txt").read_text().split("## ")[1:]
    assert [int(pair.split("\n")[0]) for pair in asked] == list(range(PAIRS))
    write_answers(tmp_path / "guess.jsonl", ["kept"] * PAIRS)
    ask("--answers", "guess.jsonl", "--output", str(tmp_path / "scored.jsonl"))
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    text = "".join(text_file.read_text().lower().split())
    found = 0
    for pair, answer in zip(asked, scored, strict=True):
        first, second = ("".join(line[3:].split()) for line in pair.split("\n")[1:3])
        orders = {"kept": first + second in text, "swapped": second + first in text}
        found += any(orders.values())
        assert orders[answer["right"]] or not any(orders.values())
    assert found > PAIRS / 2


def test_right_answers_are_all_right_and_their_contrary_all_wrong(ask, tmp_path, capsys):
    write_answers(tmp_path / "guess.jsonl", ["kept"] * PAIRS)
    ask("--answers", "guess.jsonl", "--output", str(tmp_path / "scored.jsonl"))
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    orders = [line["right"] for line in scored]
    assert set(orders) == {"kept", "swapped"}
    assert [line["pair"] for line in scored] == list(range(PAIRS))
    capsys.readouterr()
    write_answers(tmp_path / "right.jsonl", orders)
    ask("--answers", "right.jsonl")
    assert f"| all | 100.0% | 75.8% .. 100.0% | {PAIRS} |" in capsys.readouterr().out
    wrong = ["kept" if order == "swapped" else "swapped" for order in orders]
    write_answers(tmp_path / "wrong.jsonl", wrong, sure=False)
    ask("--answers", "wrong.jsonl")
    printed = capsys.readouterr().out
    assert f"| not sure | 0.0% | 0.0% .. 24.2% | {PAIRS} |" in printed
    assert "| sure | - | - | 0 |" in printed


def test_wrong_answers_files_are_named_with_their_line(ask, tmp_path):
    path = tmp_path / "answers.jsonl"
    write_answers(path, ["kept"] * (PAIRS - 1))
    with pytest.raises(UserError, match=f"must answer all {PAIRS} pairs; no line has pair 11"):
        ask("--answers", path.name)
    path.write_text('{"pair": 0, "order": "left", "sure": true}\n')
    with pytest.raises(UserError, match="line 1: .*order"):
        ask("--answers", path.name)
    path.write_text('{"pair": 0, "order": "kept", "sure": true}\n' * 2)
    with pytest.raises(UserError, match="line 2: pair 0 has been answered before"):
        ask("--answers", path.name)
    with pytest.raises(UserError, match="cannot be read"):
        ask("--answers", "missing.jsonl")
    with pytest.raises(UserError, match="goes with --answers"):
        ask("--ask", "pairs.txt", "--output", str(tmp_path / "scored.jsonl"))


def test_more_pairs_than_there_are_is_refused(data, tmp_path):
    asked = ["--samples", "8", "--ask", str(tmp_path / "pairs.txt")]
    with pytest.raises(UserError, match=r"--pairs 480: must be at most \d"):
        main(["--data", str(data), *asked])
