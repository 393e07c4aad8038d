"""No tool writes over its input; an output that cannot be written is one line, not a traceback."""

import errno
import os
import subprocess
import sys

import pytest

from albert_ds import cli
from albert_ds.errors import UserError
from albert_ds.files import write_file
from tests.conftest import ROOT
from tests.models import run_export, run_import
from tools.demo import small_tasks, tei_to_text

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


@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        ("tools/probe.py", ("--checkpoint", "a", "--data", "b")),
        ("tools/lab/paper_table.py", ("--rows", "a=b")),
        ("tools/comm_volume.py", ()),
        ("tools/throughput_bench.py", ()),
    ],
)
@pytest.mark.parametrize("name", ["absent/file", ".", "a-file/below", "/dev/null"])
def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path, tool, flags, name):
    (tmp_path / "a-file").write_text("")
    command = [sys.executable, str(ROOT / tool), *flags, "--output", name]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert f"--output {name}: must be a file in a folder" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


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
