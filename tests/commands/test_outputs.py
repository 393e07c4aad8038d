"""No tool writes over its input; an output that cannot be written is one line, not a traceback."""

import errno
import os

import pytest

from albert_ds import __main__ as albert_ds
from albert_ds import cli
from albert_ds.errors import UserError
from albert_ds.files import write_file
from tests.command import run_main
from tests.models import run_export, run_import
from tools.demo import small_tasks, tei_to_text
from tools.lab import paper_table

TEI = '<TEI xmlns="http://www.tei-c.org/ns/1.0"><text><body><p>One.</p></body></text></TEI>'


def test_tei_to_text_never_writes_over_its_input(tmp_path):
    path = tmp_path / "a.xml"
    path.write_text(TEI)
    with pytest.raises(UserError, match="is the input"):
        tei_to_text.main(["--input", str(path), "--output", str(path)])
    assert path.read_text() == TEI
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(UserError, match="is the input"):
        tei_to_text.main(["--input", str(path), "--output", str(link)])
    assert path.read_text() == TEI


def test_small_tasks_never_cuts_the_published_file(tmp_path):
    folder = tmp_path / "glue" / "SST-2"
    folder.mkdir(parents=True)
    content = "sentence\tlabel\n" + "a film\t1\n" * 9
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text(content)
    argv = ["--files", tmp_path, "--output", tmp_path / "glue", "--tasks", "sst2", "--train", 3]
    with pytest.raises(UserError, match="is the input"):
        small_tasks.main([str(word) for word in argv])
    assert (folder / "train.tsv").read_text() == content


@pytest.mark.parametrize("convert", [run_import, run_export])
def test_conversion_in_place_is_refused(tmp_path, convert):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is the input"):
        convert(tmp_path, tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    for command in (
        (albert_ds.main, "probe", "--checkpoint", "a", "--data", "b"),
        (albert_ds.main, "traffic"),
        (albert_ds.main, "bench"),
        (paper_table.main, "--rows", "a=b"),
    ):
        for name in ("absent/file", ".", "a-file/below", "/dev/null"):
            done = run_main(*command, "--output", name)
            assert done.code == 2 and len(done.err.strip().splitlines()) == 1, done
            assert f"--output {name}: must be a file in a folder" in done.err


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 5), (errno.EACCES, 2), (errno.EROFS, 5)]
)
def test_a_file_that_cannot_be_written_ends_a_command_with_one_line(
    tmp_path, monkeypatch, capsys, number, code
):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    with pytest.raises(SystemExit) as ending:
        cli.run(lambda _: write_file(tmp_path / "out.json", "x") and None)
    assert ending.value.code == code
    assert capsys.readouterr().err == f"albert-ds: {tmp_path / 'out.json'}: {os.strerror(number)}\n"
    assert not list(tmp_path.iterdir())
