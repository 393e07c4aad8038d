"""The demonstration's texts: a corpus of prose and small copies of tasks."""

import pytest

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.tasks.glue import GLUE
from albert_ds.tasks.race import read_passage
from albert_ds.tasks.squad.dataset import read_squad
from tests.finetuning import write_cola, write_mnli, write_race, write_squad
from tools.demo import demo_corpus, small_tasks
from tools.demo.demo_corpus import clean

PROSE = "The quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize(
    ("paragraph", "sentences"),
    [
        (PROSE, [PROSE]),
        ("The quick brown\nfox jumps over the\nlazy dog.", [PROSE]),
        (f"{PROSE} Too short. {PROSE}", [PROSE, PROSE]),
        ("The ``quick`` *brown* :class:`fox` jumps over `the lazy <l.html>`_ **dog**.", [PROSE]),
        ("The quick [brown fox](http://fox.org/) jumps over the lazy dog.", [PROSE]),
        ("The quick brown fox jumps over the lazy dog", []),
        ("the quick brown fox jumps over the lazy dog.", []),
        ("The quick brown fox jumps over x = f(y) lazily.", []),
        ("Returns the quick brown fox of numpy.ndarray.shape here.", []),
        ("The quick brown fox jumps over 1234 5678 9012.", []),
        ("See https://example.org for the quick brown fox.", []),
        (
            "It works with all of them, e.g. Python is a fine example.",
            ["It works with all of them, e.g. Python is a fine example."],
        ),
    ],
)
def test_only_whole_sentences_of_words_are_kept(paragraph, sentences):
    assert clean(paragraph) == sentences


def test_the_corpus_is_reproducible_and_of_the_size_asked_for(tmp_path, capsys):
    texts = []
    for name in ("a.txt", "b.txt"):
        demo_corpus.main(["--output", str(tmp_path / name), "--max-bytes", "30000"])
        texts.append((tmp_path / name).read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert 15_000 < len(texts[0].encode()) <= 30_000
    documents = texts[0].removesuffix("\n\n").split("\n\n")
    assert f"{len(documents)} documents" in capsys.readouterr().out
    assert all(line[-1] in ".?!)\"'" for text in documents for line in text.split("\n"))


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
    small_tasks.main([str(word) for word in given])


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
    paragraphs = read_squad(path, answerable=False)
    questions = [question for _, asked in paragraphs for question in asked]
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
