"""RACE as released: the blank of a question, what is cut, and every way for a file to be wrong."""

import json
import os

import numpy as np
import pytest

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.tasks.features import Split
from albert_ds.tasks.race import RaceTask
from albert_ds.tasks.recipes import Lengths
from albert_ds.tasks.registry import fingerprint_splits

PASSAGE = {
    "answers": ["B", "D"],
    "options": [["one", "two", "three", "four"], ["a b", "c", "d", "e"]],
    "questions": ["It is _ and _ .", "Which is right?"],
    "article": "The value of an object may change. " * 3,
    "id": "high1.txt",
}


def write(folder, level="high", split="dev", name="1.txt", **changes):
    path = folder / split / level / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(PASSAGE | changes), encoding="utf-8")
    return path


def test_options_take_the_blank_or_stand_behind(tmp_path, vocab):
    write(tmp_path)
    lengths = Lengths(sequence=200, question=60)
    features = RaceTask().build(tmp_path, "dev", vocab, lengths)
    passage = vocab.encode([PASSAGE["article"]])[0]
    endings = [f"It is {x} and {x} ." for x in PASSAGE["options"][0]]
    endings += [f"Which is right? {x}" for x in PASSAGE["options"][1]]
    for row, ending in enumerate(vocab.encode(endings)):
        ids, first = features.sequence(row)
        assert ids.tolist() == [2, *passage, 3, *ending, 3] and first == len(passage) + 2
    assert features.arrays["labels"].tolist() == [1, 3] and features.choices == 4
    assert features.counts == {"examples": 2, "of them middle": 0, "of them high": 2}
    for name in ("2.TXT", "3.json", "deeper/4.txt"):
        write(tmp_path, name=name)
    counts = RaceTask().build(tmp_path, "dev", vocab, lengths).counts
    assert counts == features.counts | {"files left out, such as dev/high/2.TXT": 3}


def test_the_passage_loses_its_end_and_the_option_its_front(tmp_path, vocab):
    write(tmp_path)
    features = RaceTask().build(tmp_path, "dev", vocab, Lengths(sequence=20, question=5))
    passage = vocab.encode([PASSAGE["article"]])[0]
    ending = vocab.encode(["It is one and one ."])[0]
    ids, _ = features.sequence(0)
    assert ids.tolist() == [2, *passage[:12], 3, *ending[-5:], 3]
    assert features.counts["passages cut at the end"] == 8
    assert features.counts["options cut at the front"] == 8


def test_levels_are_reported_apart_and_together(tmp_path, vocab, lengths):
    write(tmp_path, level="middle")
    write(tmp_path, level="high")
    task = RaceTask()
    features = task.build(tmp_path, "dev", vocab, lengths)
    split = Split(data=tmp_path, name="dev", lengths=lengths, features=features)
    outputs = {"logits": np.eye(4)[[1, 0, 1, 3]]}  # B A of middle, B D of high
    assert task.score(split, outputs) == {
        "accuracy": 0.75,
        "accuracy_middle": 0.5,
        "accuracy_high": 1.0,
    }
    task.write(split, outputs, tmp_path, {})
    assert json.loads((tmp_path / "predictions.dev.json").read_text()) == {
        "middle/1.txt-0": "B",
        "middle/1.txt-1": "A",
        "high/1.txt-0": "B",
        "high/1.txt-1": "D",
    }


def test_a_passage_of_another_level_is_another_split(tmp_path, vocab, lengths):
    keys = []
    for level in ("middle", "high"):
        for split in ("train", "dev"):
            write(tmp_path / level, level=level, split=split)
        keys.append(fingerprint_splits("race", RaceTask(), tmp_path / level, vocab, lengths))
    assert all(keys[0][split] != keys[1][split] for split in ("train", "dev"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answers": ["B"]}, "questions, options and answers are 2, 2, 1; must be equal"),
        ({"answers": ["B", "E"]}, 'answers.1 "E": must be one of "A", "B", "C", "D"'),
        ({"options": [["a"] * 4, ["b"] * 3]}, '["b", "b", "b"]: must be a list of 4 values'),
    ],
)
def test_a_wrong_passage_is_named(tmp_path, vocab, lengths, changes, words):
    path = write(tmp_path, **changes)
    with pytest.raises(DamagedData) as caught:
        RaceTask().build(tmp_path, "dev", vocab, lengths)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_or_truncated_file_is_named(tmp_path, vocab, lengths):
    with pytest.raises(UserError, match="no .*txt in .*middle or .*high"):
        RaceTask().build(tmp_path, "dev", vocab, lengths)
    path = write(tmp_path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(DamagedData, match="1.txt: not JSON"):
        RaceTask().build(tmp_path, "dev", vocab, lengths)
    path.write_text("{}")
    with pytest.raises(DamagedData, match='1.txt: no "article" in it'):
        RaceTask().build(tmp_path, "dev", vocab, lengths)
    path.unlink()
    write(tmp_path, split="train")
    os.mkfifo(path)  # a reader would wait for ever
    with pytest.raises(UserError, match="1.txt: not a file"):
        fingerprint_splits("race", RaceTask(), tmp_path, vocab, lengths)
