"""However the text is cut into units of work, every document is read once."""

import os
import re
import socket
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import pytest

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.storage import find_files, refuse_within
from albert_ds.text.documents import MAX_LINE_BYTES
from albert_ds.text.sources import cut_units, read_documents
from tests.command import run_command
from tests.data.corpus import make_documents, read_all, write_wiki
from tests.text.test_documents import DOCUMENTS, JSON, TEXT, WIKI

ODD = "text\n\n \n\u3000\na\n\u3000\nb c\n\n\n\u00e9\u4e2d\n<doc x\n\n{\n \n<doc x\n{"


@pytest.mark.parametrize("content", [WIKI, TEXT, JSON, ODD], ids=["wiki", "text", "json", "odd"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_cut_gives_the_same_documents(tmp_path, content, newline):
    path = tmp_path / "corpus"
    path.write_bytes((content * 5).replace("\n", newline).encode())
    whole = [document.lines for document in read_all([path])]
    assert len(whole) > 5 and (content == ODD or whole == DOCUMENTS * 5)
    for unit_bytes in range(1, path.stat().st_size + 2):
        assert [d.lines for d in read_all([path], unit_bytes)] == whole, unit_bytes


def test_a_line_of_any_length_is_never_in_memory(tmp_path):
    """Of a JSON array of 100 MB, nearly all a hole in the file."""
    path = tmp_path / "long"
    path.write_bytes(b'[{"text": "' + b"x" * (1 << 17))
    os.truncate(path, 100 << 20)
    tracemalloc.start()
    ((piece,),) = units = cut_units([str(path)])
    peak_of_cutting = tracemalloc.get_traced_memory()[1]
    docs = [reading.document for unit in units for reading in read_documents(unit)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert piece.size == 100 << 20 and [document.damage for document in docs] == ["overlong_line"]
    assert peak_of_cutting < MAX_LINE_BYTES and peak < 3 * MAX_LINE_BYTES


def test_the_place_of_damage_is_there_in_a_file_that_is_cut(tmp_path):
    lines = [b"text %d" % number if number % 2 else b"" for number in range(999)]
    lines[77] = lines[777] = b"\xff"
    (tmp_path / "corpus").write_bytes(b"\n".join(lines))
    with patch("albert_ds.text.sources.UNIT_BYTES", 2_000):
        units = cut_units([str(tmp_path / "corpus")])
    damage = [r.place for unit in units for r in read_documents(unit) if r.document.damage]
    assert damage[0] == f"{tmp_path}/corpus: line 78"
    begin, line = re.search(r"corpus, from byte ([\d,]+) on: line (\d+)$", damage[1]).groups()
    rest = b"\n".join(lines)[int(begin.replace(",", "")) :]
    assert rest.split(b"\n")[int(line) - 1] == b"\xff"


def test_units_are_of_about_one_size(tmp_path):
    paths = []
    for number in range(8):
        paths.append(write_wiki(tmp_path / str(number), make_documents(10 * number, seed=number)))
    with patch("albert_ds.text.sources.UNIT_BYTES", 20_000):
        units = cut_units([str(path) for path in paths])
    sizes = [sum(piece.size for piece in unit) for unit in units]
    assert sum(sizes) == sum(path.stat().st_size for path in paths)
    assert max(sizes) < 25_000  # up to the end of the document at hand
    assert len(units) < 3 * sum(sizes) / 20_000
    assert len(read_all(paths, 20_000)) == sum(10 * number for number in range(8))


def test_find_files(tmp_path):
    for name in ("AA/wiki_01", "AA/wiki_00", "AB/wiki_00"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    everything = [f"{tmp_path}/{name}" for name in ("AA/wiki_00", "AA/wiki_01", "AB/wiki_00")]
    assert find_files([f"{tmp_path}/A?/*"]) == everything
    assert find_files([f"{tmp_path}/**", f"{tmp_path}/AA/wiki_00"]) == everything
    (tmp_path / "odd[1].txt").touch()
    assert find_files([f"{tmp_path}/odd[1].txt"]) == [f"{tmp_path}/odd[1].txt"]
    with pytest.raises(UserError, match=r"--input .*/AC/\*: matches no file$"):
        find_files([f"{tmp_path}/A?/*", f"{tmp_path}/AC/*"])
    (tmp_path / ".hidden").touch()
    (tmp_path / "AA" / "loop").symlink_to(tmp_path)
    everything.append(f"{tmp_path}/odd[1].txt")
    assert find_files([str(tmp_path)]) == everything
    assert find_files([f"{tmp_path}/**", f"{tmp_path}/AA/../A?/*"]) == everything
    (tmp_path / "state.json").write_text("[1]")  # not that of `datasets`
    assert find_files([str(tmp_path)]) == [*everything, f"{tmp_path}/state.json"]
    (tmp_path / "odd[1]").mkdir()
    with pytest.raises(UserError, match=r"--input .*/odd\[1\]: matches no file$"):
        find_files([f"{tmp_path}/odd[1]"])


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.symlink_to("absent"), "a link to nothing"),
        (lambda path: path.symlink_to(path), "a link to nothing"),
        (os.mkfifo, "no file"),
        (make_socket, "no file"),
    ],
)
def test_what_can_be_no_text_is_refused_wherever_it_is_found(tmp_path, make, what, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus/more").mkdir(parents=True)
    Path("corpus/a.txt").write_text("Text.\n")
    make(Path("corpus/more/odd.txt"))
    for pattern in ("corpus", "corpus/**", "corpus/*/*", "corpus/more/odd.txt"):
        for command in (("vocab",), ("shards", "--vocab", "x")):
            done = run_command(*command, "--input", pattern, "--output", "out")
            assert done.code == 2 and f"odd.txt: is {what}; take it away" in done.err, done
            assert not Path("out").exists()


def test_hidden_files_are_counted(tmp_path, vocab):
    vocab.write(tmp_path)
    (tmp_path / "corpus").mkdir()
    for name in (".a", ".b", "c"):
        (tmp_path / "corpus" / name).write_text("Text. More text.\n\nAnother text.\n")
    words = ("--input", tmp_path / "corpus", "--any-script", "--max-unknown", 1)
    words = (*words, "--vocab", tmp_path / "spiece.model", "--output", tmp_path / "out")
    assert "left out: hidden files and folders (2)" in run_command("shards", *words).out


def test_an_output_that_would_become_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in/deep").mkdir(parents=True)
    Path("in/a.txt").write_text("Text.\n")
    Path("beside").symlink_to("in")
    (tmp_path / "pieces").write_bytes(b"")
    refused = [("in", "in/out"), ("in/**", "in/deep/out"), ("beside", "in/out"), ("in", "in/deep")]
    refused += [("in/*/*", "in/out"), (".", "out"), ("in", "beside/out")]
    for pattern, output in refused:
        for command in (("vocab",), ("shards", "--vocab", "x"), ("learn", "--hours", 1)):
            flag = "--text" if command[0] == "learn" else "--input"
            done = run_command(*command, flag, pattern, "--output", output)
            assert done.code == 2 and f"is in {flag} {pattern}; name a folder outside" in done.err
            assert not (Path(output) / "settings.json").exists()
            assert sorted(Path("in").rglob("*")) == [Path("in/a.txt"), Path("in/deep")]
    for pattern, output in (("in", "out"), ("in/*", "in/out"), ("in/*.txt", "in/out")):
        refuse_within(Path(output), [pattern])


@pytest.mark.parametrize("change", [lambda path: path.write_text("new\n"), os.remove])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, change):
    path = tmp_path / "corpus.txt"
    path.write_text("one\n\ntwo\n")
    (unit,) = cut_units([str(path)])
    readings = read_documents(unit)
    assert next(readings).document.lines == ["one"]
    change(path)
    with pytest.raises((DamagedData, FileNotFoundError), match=re.escape(str(path))):
        list(readings)
