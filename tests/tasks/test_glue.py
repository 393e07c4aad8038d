"""The nine tasks' files: every quirk of the published ones, every way to be wrong."""

import numpy as np
import pytest

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.tasks.features import Split
from albert_ds.tasks.glue import GLUE, score_glue

MNLI = ["index", "promptID", "pairID", "genre", "s1_binary_parse", "s2_binary_parse", "s1_parse"]
MNLI = [*MNLI, "s2_parse", "sentence1", "sentence2"]
STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2"]
STSB = [*STSB, "sentence1", "sentence2"]
# Of each task the rows of a split as published: (header, rows), and the labels they mean.
FILES = {
    ("cola", "train"): (None, [["gj04", "1", "", "A b."], ["gj04", "0", "*", 'C "d.']], [1, 0]),
    ("cola", "test"): (["index", "sentence"], [["0", "A b."], ["1", "C d."]], [0, 0]),
    ("sst2", "dev"): (["sentence", "label"], [["a b ", "1"], ["c ", "0"]], [1, 0]),
    ("mrpc", "dev"): (
        ["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        [["1", "7", "8", 'He said "a', '"b" c'], ["0", "7", "9", "d", '" e']],
        [1, 0],
    ),
    ("stsb", "train"): ([*STSB, "score"], [["0", *"abcdef", "x", "y", "3.800"]], [3.8]),
    ("qqp", "dev"): (
        ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
        [["0", "1", "2", "a?", "b?", "1"]],
        [1],
    ),
    ("mnli", "train"): (
        [*MNLI, "label1", "gold_label"],
        [[*"012345678", "z", "x", "neutral"]],
        [2],
    ),
    ("mnli", "dev_mismatched"): (
        [*MNLI, *(f"label{i}" for i in range(1, 6)), "gold_label"],
        [[*"012345678", "z", *"abcde", "contradiction"]],
        [0],
    ),
    ("mnli", "test_matched"): (MNLI, [[*"012345678", "z"]], [0]),
    ("mnli", "test_diagnostic"): (["index", "sentence1", "sentence2"], [["0", "x", "y"]], [0]),
    ("qnli", "dev"): (
        ["index", "question", "sentence", "label"],
        [["0", "a?", "b", "not_entailment"]],
        [1],
    ),
    ("rte", "test"): (["index", "sentence1", "sentence2"], [["0", "a", "b"]], [0]),
    ("wnli", "dev"): (["index", "sentence1", "sentence2", "label"], [["0", "a", "b", "1"]], [1]),
}


def write(folder, split, header, rows):
    lines = ["\t".join(row) + "\n" for row in ([header] if header else []) + rows]
    name = "diagnostic" if split == "test_diagnostic" else split  # it has a name of its own
    (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")


def test_files_as_published_are_read(tmp_path, vocab, lengths):
    for (name, split), (header, rows, labels) in FILES.items():
        write(tmp_path, split, header, rows)
        task = GLUE[name]
        features = task.build(tmp_path, split, vocab, lengths)
        columns = [x.removeprefix("\ufeff") for x in header or task.headless]
        np.testing.assert_allclose(features.arrays["labels"], labels, rtol=1e-6)
        for number, row in enumerate(rows):
            texts = vocab.encode([row[columns.index(column)] for column in task.texts])
            expected = [2, *(piece for text in texts for piece in (*text, 3))]
            ids, first = features.sequence(number)
            assert ids.tolist() == expected and first == len(texts[0]) + 2, (name, split)
        assert features.counts["examples"] == len(rows) == features.units


HEAD = b"index\tsentence1\tsentence2\tlabel\n"
WRONG = [
    (None, UserError, "dev.tsv: No such file"),
    (b"0\ta\tb\tentailment\n", DamagedData, "line 1: the header has no column"),
    (
        b"index\tsentence1\tlabel\tsentence2\tlabel\n0\ta\tentailment\tb\tentailment\n",
        DamagedData,
        "line 1: the header has two columns 'label'",
    ),
    (HEAD + b"0\ta\tb\tentailment\n1\ta\tb", DamagedData, "line 3: 3 fields, must be 4"),
    (HEAD + b"0\ta\tb\tc\tentailment\n", DamagedData, "line 2: 5 fields, must be 4"),
    (
        HEAD + b"0\ta\tb\tperhaps\n",
        UserError,
        "line 2: label 'perhaps'; must be one of entailment, not_entailment",
    ),
    (HEAD + b"0\t\xff\n", DamagedData, "not UTF-8"),
]


def test_a_wrong_file_is_named_with_its_line(tmp_path, vocab, lengths):
    for content, kind, words in WRONG:
        if content is not None:
            (tmp_path / "dev.tsv").write_bytes(content)
        with pytest.raises(kind, match=r"dev\.tsv") as caught:
            GLUE["rte"].build(tmp_path, "dev", vocab, lengths)
        assert words in str(caught.value)


def test_a_score_is_from_0_to_5(tmp_path, vocab, lengths):
    for score in ("5.1", "-1", "nan", "much"):
        write(tmp_path, "dev", [*STSB, "score"], [["0", *"abcdef", "x", "y", score]])
        with pytest.raises(UserError, match=f"line 2: score '{score}'; must be from 0 to 5"):
            GLUE["stsb"].build(tmp_path, "dev", vocab, lengths)


def test_the_few_malformed_rows_of_qqp_are_left_out_and_counted(tmp_path, vocab, lengths):
    header, (row,), _ = FILES["qqp", "dev"]
    write(tmp_path, "train", header, [row, row[:5], row])
    write(tmp_path, "dev", header, [row, row[:5], row])
    features = GLUE["qqp"].build(tmp_path, "train", vocab, lengths)
    assert features.counts == {"examples": 2, "skipped: wrong number of fields": 1}
    with pytest.raises(DamagedData, match="line 3: 5 fields"):  # of a dev set every row counts
        GLUE["qqp"].build(tmp_path, "dev", vocab, lengths)
    write(tmp_path, "train", header, [row, row[:5], row[:4]])
    with pytest.raises(DamagedData, match="2 of 3 rows .* the first in line 3"):
        GLUE["qqp"].build(tmp_path, "train", vocab, lengths)


def as_split(task, folder, name, vocab, lengths):
    features = task.build(folder, name, vocab, lengths)
    return Split(data=folder, name=name, lengths=lengths, features=features)


@pytest.mark.parametrize(
    ("name", "split", "logits", "file", "words"),
    [
        ("rte", "test", [[2.0, 1.0]], "RTE.tsv", ["entailment"]),
        ("mnli", "test_matched", [[0, 0, 1]], "MNLI-m.tsv", ["neutral"]),
        ("mnli", "test_diagnostic", [[0, 1, 0]], "AX.tsv", ["entailment"]),
        ("cola", "test", [[0, 1], [1, 0]], "CoLA.tsv", ["1", "0"]),
        ("stsb", "train", [[5.6789]], "STS-B.train.tsv", ["5.000"]),
    ],
)
def test_predictions_are_what_the_leaderboard_takes(
    tmp_path, vocab, lengths, name, split, logits, file, words
):
    write(tmp_path, split, *FILES[name, split][:2])
    examples = as_split(GLUE[name], tmp_path, split, vocab, lengths)
    GLUE[name].write(examples, {"logits": np.array(logits, np.float32)}, tmp_path, {})
    lines = [f"{number}\t{word}" for number, word in enumerate(words)]
    assert (tmp_path / file).read_text().splitlines() == ["index\tprediction", *lines]


@pytest.mark.parametrize(
    "name", ["MNLI/diagnostic.tsv", "MNLI/AX.tsv", "diagnostic/diagnostic.tsv"]
)
def test_the_diagnostic_set_is_found_where_it_is_published(tmp_path, name):
    for folder in ("MNLI", "diagnostic"):
        (tmp_path / folder).mkdir()
    (tmp_path / name).touch()
    (path,) = GLUE["mnli"].files(tmp_path / "MNLI", "test_diagnostic")
    assert path.samefile(tmp_path / name)


def test_mismatched_scores_have_names_of_their_own(tmp_path, vocab, lengths):
    write(tmp_path, "dev_mismatched", *FILES["mnli", "dev_mismatched"][:2])
    split = as_split(GLUE["mnli"], tmp_path, "dev_mismatched", vocab, lengths)
    assert GLUE["mnli"].score(split, {"logits": np.array([[1.0, 0, 0]])}) == {"accuracy_mm": 1.0}


ALL = dict.fromkeys(("cola", "mrpc", "rte", "stsb"), ("train", "dev", "test"))
PUBLISHED = {**ALL, "sst2": ("dev",), "wnli": ("train", "dev"), "qnli": ("dev", "test")}


@pytest.mark.parametrize(("name", "splits"), PUBLISHED.items())
def test_the_published_files_have_as_many_examples_as_published(real, vocab, lengths, name, splits):
    task = GLUE[name]
    for split in splits:
        features = task.build(real("glue") / task.folder, split, vocab, lengths)
        assert features.counts["examples"] == task.published[split] == features.units
        assert features.lengths.max() <= lengths.sequence


def test_classification_metrics_are_their_formulas():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 50)
    logits = rng.normal(size=(50, 2))
    said = logits[:, 1] > logits[:, 0]
    tp = (said & (labels == 1)).sum()
    tn = (~said & (labels == 0)).sum()
    fp = (said & (labels == 0)).sum()
    fn = (~said & (labels == 1)).sum()
    scores = score_glue(("matthews", "accuracy", "f1"), logits, labels)
    root = np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    assert scores["matthews"] == pytest.approx((tp * tn - fp * fn) / root)
    assert scores["accuracy"] == pytest.approx((tp + tn) / 50)
    assert scores["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))


def test_correlations_are_their_formulas():
    rng = np.random.default_rng(1)
    labels = rng.uniform(0, 5, 40)
    scores = labels**3 + rng.normal(size=40)
    correlations = score_glue(("pearson", "spearman"), scores[:, None], labels)

    def correlate(a, b):
        a, b = a - a.mean(), b - b.mean()
        return (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())

    ranks = [x.argsort().argsort().astype(float) for x in (labels, scores)]
    assert correlations["pearson"] == pytest.approx(correlate(labels, scores))
    assert correlations["spearman"] == pytest.approx(correlate(*ranks))
    assert correlations["spearman"] > correlations["pearson"]


def test_a_constant_correlates_with_nothing():
    labels = np.array([1.0, 2.0])
    scores = score_glue(("pearson", "spearman"), np.ones((2, 1)), labels)
    assert scores == {"pearson": 0.0, "spearman": 0.0}
