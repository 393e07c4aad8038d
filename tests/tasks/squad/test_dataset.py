"""SQuAD: files, windows and targets, on small files and on the real ones."""

import json

import numpy as np
import pytest

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.tasks.recipes import RECIPES, Lengths
from albert_ds.tasks.squad.dataset import read_squad
from albert_ds.tasks.squad.task import SQUAD
from albert_ds.tasks.squad.windows import build_squad, cut_windows, most_context

CONTEXT = "The singer Beyonc\u00e9 sold 1,234,567 records. " * 4 + "In Kn\u00f6sel she rests."


def question(name="q", text="Who?", answers=(("Beyonc\u00e9", 11),), **more):
    records = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": text, "answers": records, **more}


def write(path, *questions, context=CONTEXT):
    paragraphs = [{"context": context, "qas": list(questions)}]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


WRONG = {
    "not there": ([question(answers=[("Beyonc\u00e9", 12)])], "question q: answer 'Beyonc"),
    "outside": ([question(answers=[("x", 9999)])], "is not in its context at character 9999"),
    "empty": ([question(answers=[("", 0)])], "question q: answer '' is not in its context"),
    "none": ([question(answers=[])], "question q: has no answer and is not marked impossible"),
    "both": ([question(is_impossible=True)], "question q: is marked impossible and has an answer"),
    "twice": ([question("r"), question(), question("r")], "question r: the id stands there twice"),
    "no id": ([{"question": "?", "answers": []}], 'no "data.0.paragraphs.0.qas.0.id" in it'),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_question_is_named(tmp_path, case):
    questions, words = WRONG[case]
    path = write(tmp_path / "dev-v2.0.json", *questions)
    with pytest.raises(DamagedData) as caught:
        list(read_squad(path, answerable=False))
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_or_truncated_file_is_named(tmp_path):
    path = tmp_path / "dev-v1.1.json"
    with pytest.raises(UserError, match="dev-v1.1.json: no such file"):
        list(read_squad(path, answerable=True))
    write(path, question())
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DamagedData, match="dev-v1.1.json: not JSON"):
        list(read_squad(path, answerable=True))
    write(path, question(answers=[], is_impossible=True))
    with pytest.raises(DamagedData, match="SQuAD 1.1 has one to every question"):
        list(read_squad(path, answerable=True))


def test_windows_overlap_and_targets_point_at_the_answer(tmp_path, vocab):
    path = write(
        tmp_path / "train-v2.0.json",
        question("a"),
        question("b", "Where does she rest now then?", [("Kn\u00f6sel", CONTEXT.index("Kn"))]),
        question("c", "Who else?", [], is_impossible=True),
    )
    lengths = Lengths(sequence=40, question=6, stride=10)
    features = build_squad(read_squad(path, answerable=False), vocab, lengths, with_spans=True)
    context = vocab.encode([CONTEXT])[0]
    seen = {0: set(), 1: set(), 2: set()}
    counts = {0: 0, 1: 0, 2: 0}
    asked = vocab.encode(["Who?", "Where does she rest now then?", "Who else?"])
    for row, example in enumerate(features.arrays["example"].tolist()):
        ids, first = features.sequence(row)
        _, _, _, text, low, high = features.arrays["rows"][row].tolist()
        assert ids.tolist() == [2, *asked[example][:6], 3, *context[low:high], 3]
        seen[example] |= set(range(low, high))
        start, end = (int(features.arrays[f"span_{x}"][row]) for x in ("starts", "ends"))
        if features.arrays["impossible"][row]:
            assert (start, end) == (0, 0)
            continue
        counts[example] += 1
        begin = features.arrays["token_begin"][features.text(text)][low + start - first]
        stop = features.arrays["token_end"][features.text(text)][low + end - first]
        assert CONTEXT[begin:stop] == ("Beyonc\u00e9" if example == 0 else "Kn\u00f6sel")
    assert all(tokens == set(range(len(context))) for tokens in seen.values())
    assert counts[0] and counts[1] and not counts[2]
    cut = [len(tokens) > 6 for tokens in asked]
    assert features.counts["questions cut at the end"] == sum(cut) > 0
    assert features.counts["answers recovered exactly"] == 2


def test_an_answer_between_windows_is_counted(tmp_path, vocab):
    """Windows of 20 tokens, 20 apart: an answer over their edge is in none of them."""
    context = "the value " * 30
    tokens = len(vocab.encode([context])[0])
    text = context[:-1]
    path = write(tmp_path / "train-v1.1.json", question(answers=[(text, 0)]), context=context)
    for size, counted in ((tokens + 9, 0), (20, 1)):
        lengths = Lengths(sequence=size, question=4, stride=size)
        features = build_squad(read_squad(path, answerable=True), vocab, lengths, with_spans=True)
        known = features.counts.get("answers in no window, trained as if there were none", 0)
        assert known == counted == int(features.arrays["impossible"].all())


def test_an_answer_of_which_no_token_is_left_is_skipped_and_counted(tmp_path, vocab):
    context = "one \u200b two"
    path = write(tmp_path / "train-v1.1.json", question(answers=[("\u200b", 4)]), context=context)
    lengths = Lengths(sequence=40, question=6, stride=10)
    features = build_squad(read_squad(path, answerable=True), vocab, lengths, with_spans=True)
    skipped = features.counts.get("skipped: no token of the answer is left", 0)
    assert skipped + features.units == 1 and features.counts["examples"] == 1


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 25, 31, 877])
@pytest.mark.parametrize(("room", "stride"), [(10, 4), (10, 10), (4, 10), (364, 128)])
def test_windows_and_most_context_are_bert_s(length, room, stride):
    expected = []
    start = 0
    while start < length or not expected:
        size = min(length - start, room)
        expected.append((start, start + size))
        if start + size == length:
            break
        start += min(size, stride)
    windows = list(cut_windows(length, room, stride))
    assert windows == expected
    for number, good in enumerate(most_context(np.array(windows))):
        low, high = windows[number]
        for token in range(low, high):
            scores = [
                min(token - a, b - 1 - token) + 0.01 * (b - a) if a <= token < b else -1
                for a, b in windows
            ]
            assert good[token - low] == (scores.index(max(scores)) == number)


@pytest.mark.parametrize(
    ("name", "file", "questions"),
    [("squad1", "new_wiki_v1.0.json", 7938), ("squad2", "cs224n-dev-v2.0.json", 6078)],
)
def test_gold_spans_of_real_text_are_recovered(real, tmp_path, vocab, name, file, questions):
    """Accents, cases, digits with commas, other scripts: no answer is lost, few are widened."""
    path = tmp_path / f"train-{SQUAD[name].version}.json"
    path.symlink_to(real("squad") / file)
    counts = SQUAD[name].build(tmp_path, "train", vocab, RECIPES[name].lengths).counts
    exact, wider = (counts.get(f"answers recovered {x}", 0) for x in ("exactly", "as a wider span"))
    answerable = 7938 if name == "squad1" else 2910
    assert counts["examples"] == questions and exact + wider == answerable
    assert wider < 0.02 * answerable
    assert not [what for what in counts if what.startswith("skipped")]
