"""No command writes over or deletes what is not its own; an output that cannot be written is one
line, not a traceback."""

import errno
import os
import resource
import shutil
from argparse import _SubParsersAction
from dataclasses import replace
from pathlib import Path

import pytest

from albert_ds import __main__ as albert_ds
from albert_ds.__main__ import COMMANDS
from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.files import write_file
from albert_ds.vocab.vocab import Vocab
from tests.bad_input.room import WRITES, build_room, content_of
from tests.command import run_command, run_main
from tools.demo import small_tasks
from tools.lab import paper_table
from tools.lab.docs_hook import find_parser


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
def test_a_file_that_cannot_be_written_ends_a_command_with_one_line(tmp_path, capsys, number, code):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with pytest.raises(SystemExit) as ending:
        cli.run(lambda _: write_file(tmp_path / "out.json", "x", place=fail) and None)
    assert ending.value.code == code
    assert capsys.readouterr().err == f"albert-ds: {tmp_path / 'out.json'}: {os.strerror(number)}\n"
    assert not list(tmp_path.iterdir())


# What somebody else keeps in a folder, under names that commands write.
THEIRS = (
    *("spiece.model", "spiece.vocab", "tokenizer_config.json", "README.md", "report.md"),
    *("metrics.jsonl", "results.json", "model.safetensors", "train-000000.tar", "about.md"),
    *("train-my-images.tar", "heldout-notes.tar.bz2", "building/notes.txt", "building/.lock"),
    *("slurm/base.sh", "imported/state.json", "vocab/spiece.model", "data/index.json"),
)


def writers() -> list[str]:
    """Every command of albert-ds with the flag --output, and every command of a command."""
    names = []
    for name in (name for commands in COMMANDS.values() for name in commands):
        parser = find_parser(name)
        parts = [a.choices for a in parser._actions if isinstance(a, _SubParsersAction)]
        for part, of_part in (parts[0] if parts else {"": parser}).items():
            if any("--output" in action.option_strings for action in of_part._actions):
                names.append(f"{name} {part}".strip())
    return names


@pytest.fixture(scope="module")
def inputs(data, text_file, checkpoint, cola, tmp_path_factory) -> Path:
    """A folder with a valid input of every command. Nobody writes to it."""
    folder = tmp_path_factory.mktemp("inputs")
    build_room(folder, data, text_file, checkpoint, cola)
    return folder


@pytest.mark.parametrize(
    "place", ["over the input", "around the input", "over a foreign file", "behind a URL"]
)
@pytest.mark.parametrize("command", writers())
def test_no_command_writes_over_what_is_not_its_own(inputs, tmp_path, monkeypatch, command, place):
    words, sources, output = WRITES[command]
    folder = tmp_path / "mine"
    shutil.copytree(inputs, folder)
    files = [f"theirs/{name}" for name in THEIRS]
    for name in (*files, "thesis.txt", "file.json", "file.html", "file.svg", "file.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"my {name}")
    foreign = ["theirs", "thesis.txt"] if output == "folder" else [output, *files]
    places = {"over the input": sources, "around the input": ["."] * bool(sources)}
    places["behind a URL"] = ["s3://bucket/folder"]
    monkeypatch.chdir(folder)
    monkeypatch.setattr("albert_lab.bench_run.count_gpus", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    before = content_of(folder)
    for name in places.get(place, foreign):
        done = run_command(*command.split(), *words, "--output", name)
        assert done.code == 2 and len(done.err.strip().splitlines()) == 1, (name, done)
        after = content_of(folder)
        assert {path: after.get(path, "deleted") for path in before} == before, name


def test_a_report_and_a_picture_are_made_again_but_nobody_elses(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(inputs, tmp_path / "mine"))
    plots = (
        f"plots {kind}"
        for kind in ("curves", "traffic", "split", "layers", "depths", "steps", "scores")
    )
    pictures = [(command, kind) for command in plots for kind in (".svg", ".png")]
    for command, kind in (("report", ".html"), ("probe", ".json"), *pictures):
        words, _, _ = WRITES[command]
        picture = Path(f"new-{command.replace(' ', '-')}{kind}")
        for _ in range(2):
            done = run_command(*command.split(), *words, "--output", picture)
            assert done.code == 0, done
        drawn = picture.read_bytes()
        if kind == ".png":
            assert drawn.startswith(b"\x89PNG") and 3000 < len(drawn) < 100_000, command
        elif kind == ".svg":
            assert b"<svg" in drawn[:2000], command


def test_an_input_that_is_a_link_to_itself_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.json").symlink_to("loop.json")
    done = run_command("plots", "layers", "--input", "loop.json", "--output", "new.png")
    assert done.code == 2 and "loop.json: " in done.err and len(done.err.splitlines()) == 1


def test_no_trace_goes_over_a_file(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    words = ("bench", "--models", "albert-tiny", "--ranks", 1)
    done = run_command(*words, "--profile", tmp_path / "thesis.txt")
    assert done.code == 2 and "--profile" in done.err
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_partial_file_is_nobody_elses(tmp_path):
    """Neither a file nor a link that lies where a partial one could be is written to."""
    (tmp_path / "target").write_text("mine")
    for name in (".out.json.partial", ".out.json.00000000.partial"):
        (tmp_path / name).symlink_to("target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_hex", lambda size: "00" * size)
        with pytest.raises(FileExistsError):
            write_file(tmp_path / "out.json", "x")
    write_file(tmp_path / "out.json", "x")
    assert (tmp_path / "target").read_text() == "mine"
    assert (tmp_path / "out.json").read_text() == "x" and not (tmp_path / "out.json").is_symlink()


def test_a_full_disk_leaves_the_old_vocabulary(vocab, tmp_path):
    """The system lets files be emptied but not written, as if others had taken the space."""
    vocab.write(tmp_path)
    before = content_of(tmp_path)
    other = replace(vocab.normalisation, lower_case=not vocab.normalisation.lower_case)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        vocab.write(tmp_path)  # as a resumed run does
        with pytest.raises(OSError, match="File too large"):
            Vocab(vocab.model, other).write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content_of(tmp_path) == before
