"""Small copies have what they were asked for, and are read as the files they are cut from."""

import pytest

from albert_ds.errors import DamagedData, UserError
from albert_ds.tasks.glue import GLUE
from albert_ds.tasks.race import read_passage
from albert_ds.tasks.squad.dataset import read_squad
from tests.finetuning import write_cola, write_mnli, write_race, write_squad
from tools.demo.small_tasks import main


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    write_cola(folder / "glue" / "CoLA")
    write_mnli(folder / "glue" / "MNLI")
    write_squad(folder / "squad", "v2.0")
    write_race(folder / "RACE")
    return folder


def cut(files, output, *argv) -> None:
    given = ("--files", files, "--output", output, "--train", 7, "--dev", 3, *argv)
    main([str(word) for word in given])


def test_tables_keep_their_header_and_their_order(files, tmp_path):
    cut(files, tmp_path / "out", "--tasks", "cola", "mnli")
    for name, split, count in (("cola", "train", 7), ("cola", "dev", 3), ("mnli", "train", 7)):
        task = GLUE[name]
        whole, small = (
            (root / task.folder / f"{split}.tsv").read_text().splitlines()
            for root in (files / "glue", tmp_path / "out")
        )
        head = 0 if task.headless else 1
        assert len(small) == head + count and small[:head] == whole[:head]
        positions = [whole.index(line) for line in small[head:]]
        assert positions == sorted(positions) and positions[-1] > count
    assert (tmp_path / "out" / "MNLI" / "dev_mismatched.tsv").is_file()


def test_questions_keep_what_they_are_asked_about(files, tmp_path):
    cut(files, tmp_path / "out", "--tasks", "squad2", "race", "--levels", "high")
    path = tmp_path / "out" / "squad2" / "train-v2.0.json"
    found = read_squad(path, answerable=False)
    questions = [question for _, asked in found for question in asked]
    assert len(questions) == 8  # whole paragraphs of two
    (passage,) = (tmp_path / "out" / "RACE" / "dev").rglob("*.txt")
    assert passage.parent.name == "high" and len(read_passage(passage)[1]) == 2
    again = tmp_path / "again"
    cut(files, again, "--tasks", "squad2")
    assert (again / "squad2" / "train-v2.0.json").read_bytes() == path.read_bytes()


def test_what_is_missing_is_named(files, tmp_path):
    with pytest.raises(UserError, match="train-v1.1.json: no such file"):
        cut(files, tmp_path / "out", "--tasks", "squad1")
    (files / "squad" / "train-v2.0.json").write_text("[]")
    with pytest.raises(DamagedData, match="train-v2.0.json: must be a JSON object"):
        cut(files, tmp_path / "out", "--tasks", "squad2")
