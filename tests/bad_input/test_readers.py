"""What a reader or a parser is given is taken, or refused in one line: no crash, no silence."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_ds.base.storage import find_files
from albert_ds.process.world import MPI_SIZES, TORCH_NAMES, read_world
from albert_ds.text.sources import cut_units, read_documents
from albert_ds.vocab.vocab import RELEASED, train_vocab
from tests.bad_input.file_cases import HOW, damage, make_tables, make_tar, make_texts, with_content
from tests.bad_input.flag_cases import COMMANDS, find_parser, list_parsers, list_wrong
from tests.bad_input.json_cases import (
    BYTES,
    NEVER,
    REMOVED,
    VALUES,
    change,
    list_paths,
    make_readers,
)
from tests.bad_input.judge import refusal
from tests.data.corpus import build, make_documents, write_wiki


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_with_a_wrong_value_is_named(command):
    parser = find_parser(command)
    assert parser or command.startswith("tools/")  # some of which take no flags
    for each in list_parsers(parser) if parser else ():
        for flag, words in list_wrong(each):
            said = refusal(lambda parser=each, words=words: parser.parse_args(words))
            assert said and said.removeprefix("argument ").startswith(flag), words
        assert refusal(lambda parser=each: parser.parse_args(["--foo", "1"]))


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """Those of every file of JSON, and a built folder for them."""
    folder = tmp_path_factory.mktemp("readers")
    documents = make_documents(60)
    vocab = train_vocab([line for lines in documents for line in lines], RELEASED, vocab_size=240)
    build(folder / "built", vocab, [write_wiki(folder / "wiki_00", documents)])
    (folder / "work").mkdir()
    return make_readers(folder / "work", folder / "built")


def check_changes(reader, examples: int) -> None:
    paths = list(list_paths(reader.whole))

    @settings(max_examples=examples)
    @given(st.sampled_from(paths), st.sampled_from((*VALUES, *NEVER, REMOVED)))
    def check(path, value):
        content, is_wrong = change(reader, path, value)
        said = refusal(with_content(reader.path, content, reader.read))
        assert said or not is_wrong, content

    check()


@pytest.mark.parametrize("examples", [50, pytest.param(400, marks=pytest.mark.nightly)])
def test_a_file_of_json_with_a_wrong_value(readers, examples):
    for reader in readers.values():
        check_changes(reader, examples)


def test_a_file_of_json_that_is_none(readers):
    for reader in readers.values():
        whole = json.dumps(reader.whole).encode()
        for content in (*BYTES, *(whole[: int(len(whole) * x)] for x in (0.1, 0.5, 0.9, 0.999))):
            said = refusal(with_content(reader.path, content, reader.read))
            assert said or content == b"{}", (reader.path, content)


def read_texts(path: Path) -> set[str]:
    """Every document of a file or folder."""
    units = cut_units(find_files([str(path)]))
    return {"\n".join(r.document.lines) for unit in units for r in read_documents(unit)}


def check_whole(path: Path, texts: list[str]) -> None:
    """All of it is read, or one line says why not."""

    def read():
        assert {*texts} <= read_texts(path)

    refusal(read)


TEXTS = make_texts()


@settings(max_examples=280)
@given(st.sampled_from([*TEXTS]), st.sampled_from(HOW), st.randoms(use_true_random=False))
def test_damaged_text(tmp_path_factory, name, kind, draw):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(damage(TEXTS[name], kind, draw))
    refusal(lambda: [text.encode() for text in read_texts(path)])


PARAGRAPHS = st.lists(st.integers(0, 8), min_size=40, max_size=40).map(
    lambda sizes: [f"Part {n}. {'More. ' * size}".strip() for n, size in enumerate(sizes)]
)
PACKED: dict[str, Callable[[list[str]], bytes]] = {
    "a.tar": lambda texts: make_tar({str(n): text.encode() for n, text in enumerate(texts)}),
    "a.tgz": lambda texts: gzip.compress(PACKED["a.tar"](texts)),
    "a.parquet": lambda texts: make_tables(texts)["a.parquet"],
    "a.arrow": lambda texts: make_tables(texts)["a.arrow"],
}


@given(st.sampled_from([*PACKED]), PARAGRAPHS, st.sets(st.integers(1, 39), min_size=1, max_size=3))
def test_files_put_together(tmp_path_factory, name, texts, cuts):
    ends = [0, *sorted(cuts), 40]
    parts = [texts[i:j] for i, j in zip(ends, ends[1:], strict=False)]
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(b"".join(map(PACKED[name], parts)))
    check_whole(path, texts)


STARTS = ("PAR1", "PARE", "ARROW1", "FEA1", "GIF89a", "BZh91AY", "RIFF", "Obj", "MZ", "ID3", "PK")
STARTS += ("{Note}", "{{Infobox}}", '["', "[1]", "{", "[]", '{"a"', "<head of", "<doc", "sep=")


@given(st.sampled_from(STARTS), st.sampled_from(("", " is a word", ", text", "S")), PARAGRAPHS)
def test_text_that_begins_like_another_file(tmp_path_factory, start, more, texts):
    path = tmp_path_factory.getbasetemp() / "begins.txt"
    path.write_text("\n\n".join([start + more, *texts]))
    check_whole(path, texts)


@given(st.sampled_from(",;\t|"), st.sampled_from(("", " ", "  ")), st.integers(0, 2), PARAGRAPHS)
def test_tables_of_any_delimiter(tmp_path_factory, delimiter, blank, head, texts):
    rows = [["id", "text", "note"], *(["1", text, "x"] for text in texts)]
    table = "".join((delimiter + blank).join(row) + "\n" for row in rows)
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text(("", f"sep={delimiter}\n", "\ufeff")[head] + table, encoding="utf-8")
    check_whole(path, texts)


@pytest.mark.parametrize("name", ["b", "b.txt", "B.gz"])
@pytest.mark.parametrize("kind", ["link", "loop", "FIFO"])
def test_a_folder_with_what_is_no_file(tmp_path, name, kind):
    (tmp_path / "a.txt").write_text("Some text.")
    odd = tmp_path / name
    os.mkfifo(odd) if kind == "FIFO" else odd.symlink_to("absent" if kind == "link" else odd)
    assert refusal(lambda: read_texts(tmp_path))


SLURM = ("NTASKS", "STEP_NUM_TASKS", "PROCID", "LOCALID", "STEP_ID")
NAMES = [*TORCH_NAMES, *MPI_SIZES, *(f"SLURM_{name}" for name in SLURM), "LOCAL_WORLD_SIZE"]
NUMBERS = ("0", "1", "2", "3", "-1", "x", "", "9" * 30, "1.5", "\u0663", "localhost", "29500")


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(NUMBERS), min_size=1, max_size=6))
def test_variables_of_launchers(environ):
    """Absent, wrong, or contradicting each other: no rank takes itself for one that is alone."""

    def read():
        world = read_world(environ)
        several = [environ.get(name) for name in ("WORLD_SIZE", *MPI_SIZES)]
        alone = world.size == 1 and any(value not in (None, "1") for value in several)
        assert 0 <= world.rank < world.size and not alone, world

    refusal(read)
