"""What a command writes is never put over another's; names say nothing to the terminal."""

import errno
import json
import os
import tarfile
from pathlib import Path

import pytest

from albert_ds.base import errors, files
from albert_ds.base.errors import MachineFailed, UserError, name_os_error
from albert_ds.base.files import check_folder, new_folder, publish, write_report
from albert_ds.text import pipeline, work_folder
from tests.command import run_command, run_python

ESCAPE = "\x1b]0;owned\x07\x1b[31m\u202e\x9b2J"


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_appears_during_the_work_is_kept(tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    path, folder = tmp_path / "report.json", tmp_path / "folder"
    write_report(path, {"a": 1})
    write_report(path, {"a": 2})  # in place of one of ours
    assert json.loads(path.read_text())["a"] == 2
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        write_report(path, {"a": 3})
    assert path.read_text() == "mine"
    check_folder(folder)
    with pytest.raises(UserError, match="is there already and differs"), new_folder(folder) as new:
        (new / "name").write_text("ours")
        folder.mkdir()
        (folder / "name").write_text("theirs")
    assert (folder / "name").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "report.json"]


def refuse(number):
    def fail(*args, **_):
        raise OSError(number, os.strerror(number), str(args[0]))

    return fail


def test_a_file_that_appears_between_look_and_rename_is_kept(tmp_path, monkeypatch):
    (tmp_path / "new").write_text("ours")
    place = tmp_path / "place" / "name"
    mkdir = Path.mkdir

    def race(path, **options):
        mkdir(path, **options)
        place.write_text("theirs")

    monkeypatch.setattr(Path, "mkdir", race)
    with pytest.raises(FileExistsError):
        publish({tmp_path / "new": place})
    assert place.read_text() == "theirs"


def test_two_builders_of_one_folder_do_not_both_end_well(tmp_path, vocab, monkeypatch):
    """`vocab` ends while shards are built there: it refuses, and the build goes on undisturbed."""
    vocab.write(tmp_path)
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("One text. More of it.\n\nAnother text. More of it.\n")
    make = pipeline.make_index
    done = []

    def build_vocab_too(*given):
        done.append(run_command("vocab", "--input", text, "--output", out))
        return make(*given)

    monkeypatch.setattr(pipeline, "make_index", build_vocab_too)
    words = ("--vocab", tmp_path / "spiece.model", "--max-unknown", 1, "--any-script")
    built = run_command("shards", "--input", text, "--output", out, *words)
    assert built.code == 0 and done[0].code == 2, (built, done)
    assert "holds building; name another folder" in done[0].err
    assert (out / "spiece.model").read_bytes() == vocab.model


def test_a_folder_that_may_not_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    """Of a read-only file system, where root may write nothing either."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    (tmp_path / "text").write_text("One text.\n")
    for command in (("vocab",), ("shards", "--vocab", Path(files.__file__))):
        words = ("--input", tmp_path / "text", "--output", tmp_path / "a" / "b")
        done = run_command(*command, *words)
        assert done.code == 2 and done.err.count("\n") == 1
        assert f"{tmp_path} may not be written to" in done.err or "SentencePiece" in done.err
    with pytest.raises(UserError, match=f"{tmp_path} may not be written to"):
        check_folder(tmp_path / "a" / "b")
    for words in (("report", tmp_path), ("probe", "--checkpoint", tmp_path)):
        done = run_command(*words, "--output", tmp_path / "x.html")
        assert done.code == 2 and "may be written to" in done.err


def test_a_build_that_found_no_inode_for_its_lock_goes_on_later(tmp_path, vocab, monkeypatch):
    vocab.write(tmp_path)
    (tmp_path / "text").write_text("One text. More of it.\n\nAnother text. More of it.\n")
    words = ["shards", "--input", tmp_path / "text", "--output", tmp_path / "out"]
    words += ["--vocab", tmp_path / "spiece.model", "--max-unknown", 1, "--any-script"]
    with monkeypatch.context() as full:
        full.setattr(work_folder, "FileLock", refuse(errno.ENOSPC))
        full.setattr(errors, "_has_inodes", lambda place: False)
        done = run_command(*words)
        assert done.code == 5 and "its inodes are used up, not its bytes" in done.err
    assert run_command(*words).code == 0


def test_a_full_disk_is_told_from_one_without_inodes(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a" / "b"))
    assert isinstance(name_os_error(full), MachineFailed)
    assert "inodes" not in str(name_os_error(full))
    disk = os.statvfs(tmp_path)
    values = {name: getattr(disk, name) for name in ("f_files", "f_favail")} | {"f_favail": 0}
    monkeypatch.setattr(os, "statvfs", lambda path: type("Found", (), values))
    assert ("inodes" in str(name_os_error(full))) == bool(disk.f_files)


def test_names_say_nothing_to_the_terminal(tmp_path):
    """Of files, members of tars and columns, in what is printed and in what is refused."""
    (tmp_path / "a").mkdir()
    sound = "One text. More of it.\n\nAnother text. More of it.\n" * 20
    (tmp_path / "a" / ESCAPE).write_text(f"id,{ESCAPE},text\n" + "1,2,Text. More.\n" * 40)
    (tmp_path / "tar").mkdir()
    with tarfile.open(tmp_path / "tar" / "b.tar", "w") as tar:
        (tmp_path / "bad").write_bytes(sound.encode() + b"\n\n\xff\n")
        tar.add(tmp_path / "bad", ESCAPE)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ESCAPE).write_text(f"id,{ESCAPE}\n" + "1,2\n" * 40)
    words = ("-m", "albert_ds", "vocab", "--any-script", "--vocab-size", 60)
    for folder, share, code in (("a", 0.5, 0), ("tar", 0, 3), ("c", 0.5, 2)):
        place = ("--input", tmp_path / folder, "--output", tmp_path / f"of {folder}")
        done = run_python(*words, *place, "--max-damaged", share)
        assert done.returncode == code, done.stderr
        said = done.stdout + done.stderr
        assert not set(said) & {*ESCAPE} - {*"]0;owned[31m2J"} and "\\x1b" in said
