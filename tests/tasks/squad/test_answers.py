"""From scores to answers and figures: brute force, and predictions whose scores are published."""

import json
from itertools import chain

import numpy as np
import pytest

from albert_ds.tasks.features import FeatureBuilder, Split
from albert_ds.tasks.recipes import Lengths
from albert_ds.tasks.squad.answers import best_spans, conditional_spans, linear_spans, name_answers
from albert_ds.tasks.squad.dataset import SquadQuestion, read_squad
from albert_ds.tasks.squad.score import f1, find_threshold, score_answers, simplify, summarise
from albert_ds.tasks.squad.task import SQUAD
from albert_ds.tasks.squad.windows import cut_windows, most_context
from tests.tasks.squad.test_dataset import question, write

LONGEST = 4


@pytest.fixture
def features():
    """Two questions of 3 and 2 tokens over contexts of 17 and 6 tokens, one character each."""
    builder = FeatureBuilder()
    characters = []
    for example, (asked, length) in enumerate(((3, 17), (2, 6))):
        text = builder.add_text(list(range(30, 30 + length)))
        words = builder.add_text(list(range(10, 10 + asked)))
        characters += [*range(length), *[-1] * asked]
        for low, high in cut_windows(length, 8, 5):
            builder.add_row(example, (words, 0, asked), (text, low, high))
    begin = np.array(characters, np.int32)
    return builder.build(token_begin=begin, token_end=begin + 1)


def brute_force(features, scored) -> list[dict]:
    """(first, after) -> score of every valid span of each question."""
    spans: list[dict] = [{}, {}]
    rows, example = features.arrays["rows"], features.arrays["example"]
    for number in (0, 1):
        windows = np.flatnonzero(example == number)
        good = most_context(rows[windows][:, 4:])
        for row, keep in zip(windows, good, strict=True):
            shift = rows[row][2] + 2
            low = rows[row][4]
            for start, end, score in zip(*scored[row], strict=True):
                a, b = start - shift, end - shift
                if 0 <= a <= b < rows[row][5] - low and b - a < LONGEST and keep[a]:
                    spans[number][int(low + a), int(low + b + 1)] = float(score)
    return spans


def check(features, scored) -> None:
    proposals = best_spans(features, iter(scored), LONGEST)
    for spans, every in zip(proposals, brute_force(features, scored), strict=True):
        best = sorted(every.items(), key=lambda item: -item[1])[: len(spans)]
        assert spans and [s for s, _, _ in spans] == pytest.approx([s for _, s in best])
        assert [(a, b) for _, a, b in spans] == [span for span, _ in best]


def test_linear_spans_are_the_best_of_all(features):
    rng = np.random.default_rng(0)
    total = int(features.lengths.sum())
    outputs = {name: rng.normal(size=total).astype(np.float32) for name in ("start", "end")}
    check(features, list(linear_spans(features, outputs)))


def test_conditional_spans_are_the_best_of_five_by_five(features):
    rng = np.random.default_rng(1)
    count = features.units
    outputs = {
        "start_index": np.stack([rng.permutation(13)[:5] for _ in range(count)]),
        "start_score": rng.normal(size=(count, 5)),
        "end_index": rng.integers(0, 13, (count, 5, 5)),
        "end_score": rng.normal(size=(count, 5, 5)),
    }
    outputs["end_index"] = np.argsort(rng.random((count, 5, 13)), axis=2)[:, :, :5]
    check(features, list(conditional_spans(features, outputs)))


def test_answers_are_distinct_texts_of_the_context():
    spans = [(2.0, 0, 3), (1.5, 4, 7), (1.0, 8, 11)]
    answers = name_answers(spans, "one two one")
    assert [answer["text"] for answer in answers] == ["one", "two"]
    assert answers[0]["probability"] == pytest.approx(np.exp(2) / (np.exp(2) + np.exp(1.5)))
    assert name_answers([], "x") == [{"text": "", "score": 0.0, "probability": 1.0}]


def test_f1_is_over_words_without_case_punctuation_and_articles():
    assert simplify("The  U.S.,  a Country!") == "us country"
    assert f1("the red house", "a red car") == pytest.approx(0.5)
    assert f1("", "") == 1 and f1("a", "b") == 0 and f1("x x y", "x") == pytest.approx(0.5)


def search_as_official(predicted, scores, odds, answerable):
    """The search of the official evaluation script of SQuAD 2.0, transcribed from its description.

    All questions start unanswered. Then they get their answers one by one, the least likely to have
    none first. Returns the points and threshold of the best moment, which is below all odds if no
    answer is best.
    """
    below = min(odds.values()) - 1
    points = [(sum(1 for name in answerable if not answerable[name]), below)]
    for name, null in sorted(odds.items(), key=lambda item: item[1]):
        if name in scores:
            if answerable[name]:
                gain = scores[name]
            else:
                gain = -1 if predicted[name] != "" else 0
            points.append((points[-1][0] + gain, null))
    best = max(number for number, _ in points)
    return 100 * best / len(scores), next(null for number, null in points if number == best)


def draw_predictions(seed):
    """40 questions: answers of which some are empty or simplify to nothing, odds, scores."""
    rng = np.random.default_rng(seed)
    names = [f"q{i}" for i in range(40)]
    has = {name: bool(rng.integers(2)) for name in names}
    asked = [
        SquadQuestion(
            id=name,
            text="?",
            answers=(("red house", 0),) if has[name] else (),
        )
        for name in names
    ]
    predicted = {name: str(rng.choice(["red house", "red", "the", "", "x"])) for name in names}
    odds = {name: float(rng.normal() - 2 * has[name]) for name in names}
    return asked, predicted, odds, has


@pytest.mark.parametrize("present", [40, 25])
@pytest.mark.parametrize("seed", range(8))
def test_the_threshold_is_that_of_the_official_search(seed, present):
    asked, predicted, odds, has = draw_predictions(seed)
    predicted = dict(list(predicted.items())[:present])
    scores = score_answers(asked, predicted, answerable=False)
    for which in (0, 1):
        values = {name: pair[which] for name, pair in scores.items()}
        expected = search_as_official(predicted, values, odds, has)
        assert find_threshold(values, odds, has, predicted) == pytest.approx(expected)


def test_partial_predictions_are_scored_both_ways():
    asked = [SquadQuestion(id=name, text="?", answers=(("x", 0),)) for name in "ab"]
    assert summarise(score_answers(asked, {}, answerable=True), 2)["exact"] == 0
    scores = score_answers(asked, {"a": "X."}, answerable=False)
    assert scores == {"a": (1.0, 1.0)}
    assert summarise(scores, 2) == {
        "exact": 50.0,
        "f1": 50.0,
        "exact_predicted": 100.0,
        "f1_predicted": 100.0,
        "questions_without_prediction": 1,
    }
    assert summarise(scores, 1) == {"exact": 100.0, "f1": 100.0}


@pytest.mark.parametrize(
    ("name", "data", "file", "em", "f1_score"),
    [
        ("squad1", "squad-dev-v1.1.rebuilt", "v1.1-bert-ensemble", 86.206, 92.196),
        ("squad2", "squad-dev-v2.0.rebuilt", "v2.0-bert-single", 78.742, 81.775),
    ],
)
def test_published_predictions_score_as_published(real, name, data, file, em, f1_score):
    folder = real("squad")
    answerable = SQUAD[name].answerable
    paragraphs = read_squad(folder / f"{data}.json", answerable=answerable)
    asked = list(chain.from_iterable(questions for _, questions in paragraphs))
    predicted = json.loads((folder / "predictions" / f"{file}.json").read_text())
    summary = summarise(score_answers(asked, predicted, answerable=answerable), len(asked))
    assert (round(summary["exact"], 3), round(summary["f1"], 3)) == (em, f1_score)


def test_published_predictions_cut_short_score_as_the_official_script_has_it(real):
    """Over the predicted questions alone; and the threshold search over them."""
    folder = real("squad")
    paragraphs = read_squad(folder / "squad-dev-v2.0.rebuilt.json", answerable=False)
    asked = list(chain.from_iterable(questions for _, questions in paragraphs))
    every = json.loads((folder / "predictions" / "v2.0-bert-single.json").read_text())
    predicted = dict(list(every.items())[::2])
    whole = score_answers(asked, every, answerable=False)
    scores = score_answers(asked, predicted, answerable=False)
    summary = summarise(scores, len(asked))
    assert summary["f1_predicted"] == pytest.approx(100 * np.mean([whole[q][1] for q in predicted]))
    assert summary["f1"] == pytest.approx(summary["f1_predicted"] * len(predicted) / len(asked))
    assert summary["questions_without_prediction"] == len(asked) - len(predicted)
    rng = np.random.default_rng(0)
    has = {q.id: bool(q.answers) for q in asked}
    odds = {q.id: float(rng.normal() - has[q.id]) for q in asked}
    values = {name: pair[1] for name, pair in scores.items()}
    expected = search_as_official(predicted, values, odds, has)
    assert find_threshold(values, odds, has, predicted) == pytest.approx(expected)


def test_what_is_written_scores_as_what_was_measured(tmp_path, vocab):
    """Under 2.0: the predictions file alone gives the EM and F1 of the best threshold."""
    questions = [question(f"q{i}") for i in range(4)]
    questions += [question(f"n{i}", "Who not?", [], is_impossible=True) for i in range(3)]
    write(tmp_path / "dev-v2.0.json", *questions)
    lengths = Lengths(sequence=40, question=6, stride=10)
    task = SQUAD["squad2"]
    features = task.build(tmp_path, "dev", vocab, lengths)
    split = Split(data=tmp_path, name="dev", lengths=lengths, features=features)
    rng = np.random.default_rng(3)
    count = features.units
    outputs = {
        "start_index": rng.integers(0, 40, (count, 5)),
        "start_score": rng.normal(size=(count, 5)),
        "end_index": rng.integers(0, 40, (count, 5, 5)),
        "end_score": rng.normal(size=(count, 5, 5)),
        "impossible": rng.normal(size=count),
    }
    metrics = task.score(split, outputs)
    assert metrics["f1"] >= 100 * 3 / 7  # that of no answer at all, though many odds are below 0
    task.write(split, outputs, tmp_path, metrics)
    predicted = json.loads((tmp_path / "predictions.dev.json").read_text())
    asked = [q for _, qs in read_squad(tmp_path / "dev-v2.0.json", answerable=False) for q in qs]
    again = summarise(score_answers(asked, predicted, answerable=False), len(asked))
    assert again == {name: pytest.approx(metrics[name]) for name in again}
    odds = json.loads((tmp_path / "null_odds.dev.json").read_text())
    assert predicted == {
        name: "" if odds[name] > metrics["threshold"] else answers[0]["text"]
        for name, answers in json.loads((tmp_path / "nbest.dev.json").read_text()).items()
    }
