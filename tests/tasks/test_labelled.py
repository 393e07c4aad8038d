"""Labels of the user's own: every form of file, what the labels mean, every way to be wrong."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from albert_ds.base.errors import UserError
from albert_ds.tasks.features import NO_TAG, Split
from albert_ds.tasks.recipes import Lengths
from albert_ds.tasks.registry import open_task
from tests.command import run_command
from tests.finetuning import read_csv

TEXTS = ['the "object" type', "a list, a name", "line\nbreak"]
WORDS, TAGS = ["the", "class", "name", "list"], ["O", "B-A", "I-A", "B-B"]


def write_splits(folder, content, ending, splits=("train", "dev")):
    for split in splits:
        (folder / f"{split}.{ending}").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )


def as_table(rows, ending, end="\r\n"):
    mark = {"csv": ",", "tsv": "\t"}[ending]
    quote = ['"' + field.replace('"', '""') + '"' for row in rows for field in row]
    width = len(rows[0])
    lines = [mark.join(quote[n : n + width]) for n in range(0, len(quote), width)]
    return "\ufeff" + end.join(lines)


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_texts_of_every_file_are_the_same(tmp_path, vocab, lengths, ending, end):
    rows = [[text, label] for text, label in zip(TEXTS, ["b", "a", "b"], strict=True)]
    if ending == "jsonl":
        lines = [json.dumps({"label": label, "text": text, "id": 7}) for text, label in rows]
        content = "\n".join(lines) + "\n\n"
    else:
        content = as_table([["text", "label"], *rows], ending, end)
    write_splits(tmp_path, content, ending)
    task = open_task("text", tmp_path)
    assert task.labels == ("a", "b")
    features = task.build(tmp_path, "dev", vocab, lengths)
    assert features.arrays["labels"].tolist() == [1, 0, 1]
    for number, ids in enumerate(vocab.encode(TEXTS)):
        assert features.sequence(number)[0].tolist() == [2, *ids, 3]
    assert features.counts == {
        **{"examples": 3, "classes": 2, "of the most frequent (b)": 2, "of the rarest (a)": 1}
    }


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["0.5", "3", "-1e-3"], ()),
        (["0", "1", "10"], ("0", "1", "10")),  # whole numbers are names
    ],
)
def test_numbers_with_a_point_are_scores(tmp_path, vocab, lengths, labels, classes):
    rows = [["one", "two", label] for label in labels]
    write_splits(tmp_path, as_table([["text_a", "text_b", "label"], *rows], "csv"), "csv")
    task = open_task("text", tmp_path)
    assert task.labels == classes
    features = task.build(tmp_path, "dev", vocab, lengths)
    expected = [classes.index(x) for x in labels] if classes else [float(x) for x in labels]
    np.testing.assert_allclose(features.arrays["labels"], expected, rtol=1e-6)
    one, two = vocab.encode(["one", "two"])
    assert features.sequence(0)[0].tolist() == [2, *one, 3, *two, 3]
    assert task.metrics == (("accuracy", "f1_macro") if classes else ("pearson", "spearman"))


def test_predicted_scores_keep_their_digits(tmp_path, vocab, lengths):
    """Whatever their size; four decimals would leave of small ones little."""
    scores = np.array([0.000123456, -0.0000234567, 98765.4])
    rows = [["text", "label"], *([f"text {score}", f"{score:f}"] for score in scores)]
    write_splits(tmp_path, as_table(rows, "csv"), "csv")
    task = open_task("text", tmp_path)
    features = task.build(tmp_path, "dev", vocab, lengths)
    split = Split(data=tmp_path, name="dev", lengths=lengths, features=features)
    task.write(split, {"logits": scores[:, None].astype(np.float32)}, tmp_path, {})
    written = [float(row["prediction"]) for row in read_csv(tmp_path / "predictions.dev.csv")]
    np.testing.assert_allclose(written, scores, rtol=1e-5)


def test_an_interval_is_one_of_the_same_classes(tmp_path):
    """Four rare classes that are never found; a draw without them had twice the F1."""
    labels = np.array([*(["a"] * 48), *(["b"] * 48), "c", "d", "e", "f"])
    said = np.where(labels > "b", "a", labels)
    f1s = [2 * (labels == c)[said == c].sum() / sum((labels == c, said == c)).sum() for c in "ab"]
    rows = [["text", "label"], *([f"text {n}", label] for n, label in enumerate(labels))]
    write_splits(tmp_path, as_table(rows, "csv"), "csv")
    task = open_task("text", tmp_path)
    split = SimpleNamespace(name="dev", features=SimpleNamespace(arrays={}))
    split.features.arrays["labels"] = np.array([task.labels.index(label) for label in labels])
    logits = np.eye(6, dtype=np.float32)[[task.labels.index(label) for label in said]]
    task.write(split, {"logits": logits}, tmp_path, {})
    scores = json.loads((tmp_path / "scores.dev.json").read_text())["scores"]
    for name, value in (("accuracy", 0.96), ("f1_macro", sum(f1s) / 6)):
        score = scores[name]
        assert score["value"] == pytest.approx(value)
        assert value - 0.05 < score["low"] < value < score["high"] < value + 0.05


@pytest.mark.parametrize("ending", ["conll", "jsonl"])
@pytest.mark.parametrize("word", ["\u3000", "\xa0", "10\xa0000"])
def test_a_word_may_have_blanks_of_unicode(tmp_path, vocab, lengths, word, ending):
    """It ends no sentence: corpora have a no-break space as a word of its own."""
    content = f"Oslo\tB-A\n{word}\tO\nit\tO\n"
    if ending == "jsonl":
        content = json.dumps({"words": ["Oslo", word, "it"], "tags": ["B-A", "O", "O"]})
    write_splits(tmp_path, content, ending)
    (tmp_path / "test.conll").write_text(f"Oslo\n{word}\nit\n")
    task = open_task("tokens", tmp_path)
    for split in ("dev", "test"):
        features = task.build(tmp_path, split, vocab, lengths)
        assert features.counts["examples"] == 1 and features.counts["words"] == 3


@pytest.mark.parametrize("ending", ["conll", "txt", "jsonl"])
def test_words_keep_their_tags(tmp_path, vocab, ending):
    """A word's first piece has its tag, the others go on with it. Parts of a long sentence together
    are the whole."""
    words, tags = [*WORDS, "\u200b", *WORDS], [*TAGS, "O", *TAGS]
    if ending == "jsonl":
        content = json.dumps({"words": words, "tags": tags})
    else:
        rows = [f"{word}\t-X- _ {tag}" for word, tag in zip(words, tags, strict=True)]
        content = "\n".join(["-DOCSTART- -X- O O", "", *rows, "", ""])
    write_splits(tmp_path, content, ending)
    task = open_task("tokens", tmp_path)
    assert task.labels == ("O", "B-A", "I-A", "B-B", "I-B")
    features = task.build(tmp_path, "dev", vocab, Lengths(sequence=10))
    assert features.counts["examples"] == 1 and features.counts["words"] == 9
    encoded = vocab.encode(words)
    assert not encoded[4] and features.counts["words without a piece, taken as O"] == 1
    pairs, expected = [], []
    for row in range(features.units):
        ids = features.sequence(row)[0].tolist()
        marks = features.tags(row).tolist()
        assert len(ids) <= 10 and ids[0] == 2 and ids[-1] == 3
        assert marks[0] == marks[-1] == NO_TAG
        pairs += zip(ids[1:-1], marks[1:-1], strict=True)
    for pieces, tag in zip(encoded, tags, strict=True):
        marks = [tag, *[tag.replace("B-", "I-")] * (len(pieces) - 1)] if pieces else []
        expected += zip(pieces, map(task.labels.index, marks), strict=True)
    assert max(map(len, encoded)) > 1
    assert pairs == expected and features.units > 1
    # As a model that is always right would predict them.
    logits = np.zeros((int(features.lengths.sum()), 5), np.float32)
    flat = np.concatenate([features.tags(row) for row in range(features.units)])
    logits[np.arange(len(flat)), np.where(flat == NO_TAG, 3, flat)] = 1
    split = Split(data=tmp_path, name="dev", lengths=Lengths(), features=features)
    assert task.score(split, {"logits": logits}) == {"f1": 1, "precision": 1, "recall": 1}


GOOD = "text,label\na,x\nb,y\n"
PAIRS = "text_a,text_b,label\na,c,x\nb,d,y\n"
# (task, ending, content of both splits, or of train and dev) -> what the one line says
WRONG = {
    "no label": ("text", "csv", "text,tag\na,x\n", "2: no column 'label'; there are 'text', 'tag'"),
    "no text": ("text", "csv", "txt,label\na,x\n", "no column 'text'; there are 'txt', 'label'"),
    "delimiter": ("text", "csv", "text;label\na;x\n", "no column 'text'; there are 'text;label'"),
    "quotes": ("text", "csv", 'text,label\n"a"b,x\n', "line 2: ',' expected after '\"'"),
    "open quotes": ("text", "csv", 'text,label\n"a,x\nb,y\n', "line 2: unexpected end of data"),
    "fields": ("text", "tsv", "text\tlabel\na\tx\ty\n", "line 2: 3 fields, the header 2"),
    "twice": ("text", "csv", "text,text,label\n", "a column of the header stands there twice"),
    "nothing": ("text", "csv", "", "train.csv: holds no examples"),
    "header": ("text", "csv", "text,label\n", "train.csv: holds no examples"),
    "encoding": ("text", "csv", b"text,label\n\xe4,x\n", "line 2: not UTF-8"),
    "another encoding": (
        "text",
        "tsv",
        "text\tlabel\nТекст об этом\tx\n".encode("cp1251"),
        "it looks like",
    ),
    "NUL": ("tokens", "conll", "a O\n\0 O\n", "line 2: has a NUL byte"),
    "one class": ("text", "csv", "text,label\na,x\n", "the training set has one label, 'x'"),
    "nan": ("text", "csv", "text,label\na,0.5\nb,nan\n", "'0.5', a score, and 'nan', a class"),
    "class of scores": ("text", "csv", "text,label\na,0.5\nb,NA\n", "'0.5', a score, and 'NA', a"),
    "1e38": ("text", "csv", "text,label\na,0.5\nb,1e38\n", "'0.5', a score, and '1e38', a class"),
    "no class": ("text", "csv", "text,label\na,\n", "line 2: label '': must be text"),
    "blank": ("text", "csv", GOOD + "c,y \n", "line 4: label 'y ': must be text without blanks"),
    "single dev": ("text", "csv", (PAIRS, GOOD), "dev.csv, line 2: no column 'text_a'"),
    "pair in dev": ("text", "csv", (GOOD, PAIRS), "dev.csv, line 2: no column 'text'"),
    "null": ("text", "jsonl", '{"text": null, "label": 1}', "line 1: text: null: must be a text"),
    "not JSON": ("text", "jsonl", '{"text": "a"', "line 1: not JSON"),
    "new class": ("text", "csv", (GOOD, "text,label\na,x\nb,z\n"), "dev.csv, line 3: label 'z'"),
    "no score": ("text", "csv", ("text,label\na,0.5\n", GOOD), "label 'x': must be a number"),
    "no tag": ("tokens", "conll", "a\nb\n", "line 1: no tag"),
    "columns": ("tokens", "conll", "a O\nb x O\n", "line 2: 3 columns, the first word 2"),
    "CR": ("tokens", "conll", "a B-X\rb O\r\rc O\r", "its lines end in CR alone: convert it with"),
    "no empty lines": ("tokens", "conll", "a B-X\n" * 5001, "line 1: a sentence of 5,001 words"),
    "bare tag": ("tokens", "conll", "a O\nb LOC\n", "line 2: tag 'LOC': must be O, B-TYPE or I-"),
    "other tags": ("tokens", "conll", "a S-LOC\n", "line 1: tag 'S-LOC': must be O, B-TYPE or"),
    "only O": ("tokens", "conll", "a O\n", "no word of the training set has a tag but O"),
    "new tag": ("tokens", "conll", ("a B-X\n", "a O\nb B-Y\n"), "dev.conll, line 2: tag 'B-Y' is"),
    "sizes": ("tokens", "jsonl", '{"words": ["a"], "tags": []}', "line 1: 1 words, but 0 tags"),
    "blanks": ("tokens", "jsonl", '{"words": ["a b"], "tags": ["O"]}', "a word without blanks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_the_users_error(tmp_path, vocab, lengths, case):
    name, ending, content, words = WRONG[case]
    parts = content if isinstance(content, tuple) else (content, content)
    for split, part in zip(("train", "dev"), parts, strict=True):
        write_splits(tmp_path, part, ending, [split])
    with pytest.raises(UserError) as caught:
        open_task(name, tmp_path).build(tmp_path, "dev", vocab, lengths)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_test_set_may_have_no_labels(tmp_path, vocab, lengths):
    write_splits(tmp_path, GOOD, "csv")
    (tmp_path / "test.csv").write_text('text\na\n""\n')
    features = open_task("text", tmp_path).build(tmp_path, "test", vocab, lengths)
    assert "labels" not in features.arrays and features.units == 2
    assert [*features.counts.items()] == [("examples", 2), ("with an empty text", 1)]
    (tmp_path / "test.csv").write_text("text,label\na,\nb,\n")
    assert (
        "labels" not in open_task("text", tmp_path).build(tmp_path, "test", vocab, lengths).arrays
    )
    (tmp_path / "test.csv").unlink()
    (tmp_path / "test.jsonl").write_text('{"text": "a"}\n{"text": "b", "label": "x"}\n')
    with pytest.raises(UserError, match="1 of 2 examples have a label; must be all or none"):
        open_task("text", tmp_path).build(tmp_path, "test", vocab, lengths)


def test_the_command_ends_with_2(checkpoint, tmp_path):
    """A label of dev alone, and two files for one split: code 2, and nothing but exit.json."""
    write_splits(tmp_path, GOOD, "csv", ["train"])
    write_splits(tmp_path, "text,label\na,z\n", "csv", ["dev"])
    flags = ("--task", "text", "--data", tmp_path, "--checkpoint", checkpoint)
    done = run_command("finetune", *flags, "--output", tmp_path / "out")
    assert (
        done.code == 2 and "dev.csv, line 2: label 'z' is not in the training set: x, y" in done.err
    )
    write_splits(tmp_path, GOOD, "jsonl", ["train"])
    done = run_command("finetune", *flags, "--output", tmp_path / "other")
    assert done.code == 2 and "it has train.csv and train.jsonl" in done.err
