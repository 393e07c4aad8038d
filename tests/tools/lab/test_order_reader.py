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


@pytest.fixture
def asked(ask, tmp_path) -> dict[int, tuple[str, str]]:
    """The pairs that the command asks for, by number, without spaces."""
    ask("--ask", "pairs.txt")
    found = {}
    for pair in (tmp_path / "pairs.txt").read_text().split("## ")[1:]:
        number, *segments = pair.splitlines()[:3]
        found[int(number)] = tuple("".join(line[3:].split()) for line in segments)
    assert len(found) == PAIRS
    return found


def write_answers(path, orders: dict, sure=True) -> None:
    lines = [{"pair": pair, "order": order, "sure": sure} for pair, order in orders.items()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in reversed(lines)))


@pytest.fixture
def right(ask, asked, tmp_path, capsys) -> dict[int, str]:
    """The right order of each pair, as the command writes it."""
    write_answers(tmp_path / "guess.jsonl", dict.fromkeys(asked, "kept"))
    ask("--answers", "guess.jsonl", "--output", str(tmp_path / "scored.jsonl"))
    capsys.readouterr()
    scored = map(json.loads, (tmp_path / "scored.jsonl").read_text().splitlines())
    return {line["pair"]: line["right"] for line in scored}


def test_what_is_asked_stands_in_the_text_in_the_order_that_counts_as_right(
    text_file, asked, right
):
    """Nothing is masked. Pairs that were cut where they meet are in the text in no order."""
    text = "".join(text_file.read_text().lower().split())
    found = 0
    for pair, (first, second) in asked.items():
        orders = {"kept": first + second in text, "swapped": second + first in text}
        found += any(orders.values())
        assert orders[right[pair]] or not any(orders.values())
    assert found > PAIRS / 2


def test_right_answers_are_all_right_and_their_contrary_all_wrong(ask, right, tmp_path, capsys):
    assert set(right.values()) == {"kept", "swapped"}
    write_answers(tmp_path / "right.jsonl", right)
    ask("--answers", "right.jsonl")
    assert f"| all | 100.0% | 75.8% .. 100.0% | {PAIRS} |" in capsys.readouterr().out
    other = {"kept": "swapped", "swapped": "kept"}
    wrong = {pair: other[order] for pair, order in right.items()}
    write_answers(tmp_path / "wrong.jsonl", wrong, sure=False)
    ask("--answers", "wrong.jsonl")
    printed = capsys.readouterr().out
    assert f"| not sure | 0.0% | 0.0% .. 24.2% | {PAIRS} |" in printed
    assert "| sure | - | - | 0 |" in printed


def test_answers_to_other_pairs_are_refused(ask, right, tmp_path):
    """Numbers name pairs of the shards, so other --samples cannot be scored by mistake."""
    write_answers(tmp_path / "right.jsonl", right)
    with pytest.raises(UserError, match=r"line \d+: pair \d+ must be one of those that --ask"):
        ask("--answers", "right.jsonl", "--samples", "20")


def test_wrong_answers_files_are_named_with_their_line(ask, asked, tmp_path):
    path = tmp_path / "answers.jsonl"
    first, *others = asked
    write_answers(path, dict.fromkeys(others, "kept"))
    with pytest.raises(UserError, match=f"must answer all {PAIRS} pairs; no line has pair {first}"):
        ask("--answers", path.name)
    path.write_text(f'{{"pair": {first}, "order": "left", "sure": true}}\n')
    with pytest.raises(UserError, match="line 1: .*order"):
        ask("--answers", path.name)
    path.write_text(f'{{"pair": {first}, "order": "kept", "sure": true}}\n' * 2)
    with pytest.raises(UserError, match=f"line 2: pair {first} has been answered before"):
        ask("--answers", path.name)
    with pytest.raises(UserError, match="cannot be read"):
        ask("--answers", "missing.jsonl")
    with pytest.raises(UserError, match="goes with --answers"):
        ask("--ask", "other.txt", "--output", str(tmp_path / "scored.jsonl"))


def test_more_pairs_than_there_are_is_refused(data, tmp_path):
    asked = ["--samples", "8", "--ask", str(tmp_path / "pairs.txt")]
    with pytest.raises(UserError, match=r"--pairs 480: must be at most \d"):
        main(["--data", str(data), *asked])
