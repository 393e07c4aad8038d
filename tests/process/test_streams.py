"""What a command and a training do when nobody reads their output."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT, train_command


def run(words: list[str], **options) -> subprocess.CompletedProcess:
    given = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run([sys.executable, *map(str, words)], **given)


def run_without_reader(words: list[str]) -> subprocess.CompletedProcess:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return run(words, stdout=writer)
    finally:
        os.close(writer)


def test_a_command_without_a_reader_ends_like_any_other(data):
    done = run_without_reader(["-m", "albert_ds", "inspect", "--data", data])
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_another_pipe_that_breaks_is_no_lost_reader():
    """A process of the command's own died: that is said."""
    program = (
        "from albert_ds.base import cli\ndef main(argv): raise BrokenPipeError(32, 'Broken pipe')\n"
    )
    done = run(["-c", program + "cli.run(main)"], stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (5, "albert-ds: Broken pipe\n")


def test_a_command_whose_errors_nobody_can_read_keeps_its_code():
    with open("/dev/full", "w") as full:
        done = run(["-m", "albert_ds", "inspect", "--data", "nowhere"], stderr=full)
    assert done.returncode == 2


def test_a_command_without_standard_output_works(data):
    words = ["-m", "albert_ds", "inspect", "--data", data]
    done = run(words, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("lost", ["a pipe", "a full disk", "closed"])
def test_a_training_outlives_its_standard_output(data, tmp_path, lost):
    words = train_command(data, tmp_path / "run", steps=3, log_every=1)[1:]
    if lost == "a pipe":
        done = run_without_reader(words)
    elif lost == "closed":
        done = run(words, preexec_fn=lambda: os.close(1))
    else:
        with open("/dev/full", "w") as full:
            done = run(words, stdout=full)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the run goes on") == (lost != "closed")
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records][-1] == 3
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == 0
