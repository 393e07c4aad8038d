"""The demonstration's corpus: prose, nothing twice, always the same, no larger than asked."""

from collections import Counter

import pytest

from tools.demo.demo_corpus import clean, clean_documents, main, read_modules, split_paragraphs

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


def test_indented_and_ruled_paragraphs_are_not_prose():
    text = f"{PROSE}\n\n    indented code\n\n>>> doctest()\n\nTitle\n-----\n\n- a list\n\nLast one."
    assert split_paragraphs(text) == [PROSE, "- a list", "Last one."]


def test_documents_say_nothing_twice_and_short_ones_are_counted():
    counts = Counter()
    animals = [f"The quick brown {animal} jumps over the lazy dog." for animal in ("ant", "bee")]
    documents = [[" ".join(animals), PROSE], [PROSE, *animals], [PROSE]]
    assert list(clean_documents(iter(documents), counts)) == [f"{' '.join(animals)}\n{PROSE}\n"]
    assert counts == {"sentences": 3, "documents too short": 2}


def test_docstrings_are_read_without_importing(tmp_path):
    (tmp_path / "b.py").write_text(
        f'"""{PROSE}"""\nraise SystemExit\nclass A:\n    """Of A.\n\n    More of A."""\n'
        '    def f():\n        """Of f."""\nx = 1\n"""No docstring."""\n'
    )
    (tmp_path / "a.py").write_text("print 'Python 2'")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "c.py").write_text('"""Of a test."""')
    counts = Counter()
    assert list(read_modules(tmp_path, counts)) == [[PROSE, "Of A.", "More of A.", "Of f."]]
    assert counts == {"modules that do not parse": 1}


def test_the_corpus_is_reproducible_and_of_the_size_asked_for(tmp_path, capsys):
    texts = []
    for name in ("a.txt", "b.txt"):
        main(["--output", str(tmp_path / name), "--max-bytes", "30000"])
        texts.append((tmp_path / name).read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert 15_000 < len(texts[0].encode()) <= 30_000
    documents = texts[0].removesuffix("\n\n").split("\n\n")
    assert f"{len(documents)} documents" in capsys.readouterr().out
    assert all(line[-1] in ".?!)\"'" for text in documents for line in text.split("\n"))
