"""A folder has one owner, also on a file system without locks."""

import errno
import fcntl
import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest

from albert_ds import locks
from albert_ds.locks import FileLock
from tests.command import run_command
from tests.conftest import train_command
from tests.distributed import wait_for

FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK])
def without_flock(request, monkeypatch):
    """A file system that has no locks: Lustre's answer and NFS's."""

    def refuse(file, how):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "BEAT", 0.05)


def hold(path: Path, host: str | None) -> None:
    if host:  # as if on another machine, where nobody can ask for the process
        locks.describe_process = lambda: f"process {os.getpid()} on {host}"
    FileLock(path)
    signal.pause()


def start_owner(path: Path, host: str | None = None):
    owner = FORK.Process(target=hold, args=(path, host))
    owner.start()
    wait_for(lambda: path.is_file() and path.read_text(), "the owner")
    return owner


@pytest.mark.parametrize("host", [None, "node-7"])
def test_a_live_owner_keeps_it_and_a_dead_one_does_not(without_flock, tmp_path, host, capsys):
    path = tmp_path / ".lock"
    owner = start_owner(path, host)
    with pytest.raises(BlockingIOError, match=f"process {owner.pid} on {host or ''}"):
        FileLock(path)
    owner.kill()
    owner.join()
    lock = FileLock(path)
    assert lock.is_held() and ".lock.owner instead" in capsys.readouterr().err
    (tmp_path / ".lock.owner").write_text("another")
    assert not lock.is_held()


def test_a_released_lock_is_free(without_flock, tmp_path):
    for _ in range(2):
        FileLock(tmp_path / ".lock").release()
    assert not (tmp_path / ".lock.owner").exists()


def test_a_forked_process_releases_nothing(without_flock, tmp_path):
    lock = FileLock(tmp_path / ".lock")
    child = FORK.Process(target=lock.release)
    child.start()
    child.join()
    assert child.exitcode == 0 and lock.is_held()


def test_commands_own_their_folder_without_flock(without_flock, data, text_file, tmp_path):
    words = train_command(data, tmp_path / "run", steps=1)[2:]
    done = run_command("train", *words)
    assert done.code == 0 and done.err.count("instead") == 1
    build = ["shards", "--input", text_file, "--vocab", data / "spiece.model"]
    build += ["--output", tmp_path / "built", "--sequence-length", 64]
    assert run_command(*build).code == 0
    other = tmp_path / "other"
    other.mkdir()
    owner = start_owner(other / ".lock")
    refused = run_command("train", *train_command(data, other, steps=1)[2:])
    owner.kill()
    assert refused.code == 2
    assert re.search(rf"--output .*other: in use by process {owner.pid} on", refused.err)


def test_a_link_is_not_followed(tmp_path):
    other = tmp_path / "precious"
    other.write_text("mine")
    (tmp_path / ".lock").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        FileLock(tmp_path / ".lock")
    assert other.read_text() == "mine"
