"""A run that has lost its folder ends at the next save and mixes with no other.

A folder has one owner, also on a file system without locks.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from albert_ds.base import locks
from albert_ds.base.errors import MachineFailed
from albert_ds.base.locks import FileLock
from albert_ds.checkpoint.folder import find_newest
from albert_ds.checkpoint.run_folder import RunLock, may_write_exit
from tests.checkpoint.test_kept import save
from tests.command import run_command
from tests.conftest import train_command
from tests.distributed import run_ranks, wait_for
from tests.runs import open_small_run, small_batches, small_config

BATCHES = small_batches(3, 4)


def replace_run(run: Path) -> RunLock:
    """Rename RUN away; another run starts at its path."""
    os.rename(run, run.with_name("renamed"))
    run.mkdir()
    return RunLock(run)


LOSSES = {
    "deleted": shutil.rmtree,
    "renamed": lambda run: os.rename(run, run.with_name("renamed")),
    "replaced": replace_run,
    "its lock deleted": lambda run: (run / ".lock").unlink(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_that_has_lost_its_folder_writes_nothing_more_there(tmp_path, loss):
    run = tmp_path / "run"
    run.mkdir()
    lock = RunLock(run)
    lock.check()
    assert may_write_exit(run, lock)
    save(run, 1)
    other = LOSSES[loss](run)
    with pytest.raises(MachineFailed, match=str(run)) as lost:
        lock.check()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MachineFailed) as refused:
        save(run, 2, keep_last=1, lock=lock)
    assert str(refused.value) == str(lost.value)
    assert sorted(tmp_path.rglob("*")) == before and not may_write_exit(run, lock)
    if other is not None:
        other.check()
        assert not may_write_exit(run, None)
        other.release()
    lock.release()


def test_a_child_of_the_owner_does_not_hold_the_lock(tmp_path):
    """A loader's worker outlives a trainer that was killed."""
    lock = RunLock(tmp_path)
    parent_end, child_end = socket.socketpair()
    with parent_end, child_end:
        child = os.fork()
        if child == 0:
            parent_end.close()
            child_end.sendall(b"1")
            child_end.recv(1)  # until the parent has tried
            os._exit(0)
        parent_end.recv(1)
        lock.release()
        RunLock(tmp_path).release()
        parent_end.sendall(b"1")
        os.waitpid(child, 0)


def test_a_run_that_is_gone_is_not_made_again(tmp_path):
    gone = tmp_path / "run"
    with pytest.raises(MachineFailed, match=str(gone)):
        save(gone, 1)
    assert not gone.exists()


def train_and_lose(rank: int, folder: Path):
    """Replace RUN in step 4: how the training ended, and after how many steps."""
    from unittest.mock import patch

    from albert_ds.training import pretrain

    config = small_config(world_size=1, batch_size=4, output=str(folder / "run"))
    config = replace(config, save_every=2, log_every=1)
    config.run.mkdir()
    run = open_small_run(config, [])
    run.lock = RunLock(config.run)
    run.batches = itertools.cycle(open_small_run(config, BATCHES).batches)
    request = SimpleNamespace(reason=None)
    others = []

    def fetch(run, **options):
        if run.step == 3 and not others:
            for thread in threading.enumerate():  # the writer of step 2
                if thread is not threading.main_thread() and not thread.daemon:
                    thread.join()
            others.append(replace_run(config.run))  # keeps the other's lock
        return loop_fetch(run, **options)

    loop_fetch = pretrain.next_batch
    with (
        patch.object(pretrain, "evaluate", return_value={}),
        patch.object(pretrain, "next_batch", fetch),
    ):
        with pytest.raises(MachineFailed) as ended:
            pretrain.train(run, request)
    return str(ended.value), run.step


def test_training_ends_at_the_next_save(tmp_path):
    ((ending, step),) = run_ranks(train_and_lose, 1, tmp_path)
    assert str(tmp_path / "run") in ending and step in (4, 6)  # raised by the next save or wait
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    kept, _ = find_newest(tmp_path / "renamed")
    assert kept is not None and kept.name == "step-00000002"
    steps = (tmp_path / "renamed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps][:4] == [1, 2, 3, 4]


def test_a_refused_command_leaves_a_folder_of_others_as_it_is(tmp_path):
    (tmp_path / "exit.json").write_text("mine")
    flags = ("--data", tmp_path, "--output", tmp_path, "--steps", "0")
    done = run_command("train", *flags)
    assert done.code == 2, done
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("exit.json", "mine")]
    run = tmp_path / "run"
    run.mkdir()
    assert run_command("train", "--data", tmp_path, "--output", run, "--steps", "0").code == 2
    assert json.loads((run / "exit.json").read_text())["code"] == 2


FORK = multiprocessing.get_context("fork")


@pytest.fixture
def without_flock(monkeypatch):
    """A file system that has no locks: Lustre's answer and NFS's, in turn."""
    answers = itertools.cycle((errno.ENOSYS, errno.ENOLCK))

    def refuse(file, operation):
        raise OSError(next(answers), "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "BEAT", 0.1)
    monkeypatch.setattr(locks, "SILENT", 3000)  # a busy machine may delay a beat


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
def test_a_live_owner_keeps_it_and_a_dead_one_does_not(
    without_flock, tmp_path, host, capsys, monkeypatch
):
    path = tmp_path / ".lock"
    owner = start_owner(path, host)
    with pytest.raises(BlockingIOError, match=f"process {owner.pid} on {host or ''}"):
        FileLock(path)
    owner.kill()
    owner.join()
    monkeypatch.setattr(locks, "SILENT", 3)
    lock = FileLock(path)
    assert lock.is_held() and ".lock.owner instead" in capsys.readouterr().err
    (tmp_path / ".lock.owner").write_text("another")
    assert not lock.is_held()


def test_of_many_that_find_a_dead_owner_one_wins(without_flock, tmp_path, monkeypatch):
    """Reading is slow, so that some find the dead owner's file when it is the winner's by now."""
    read_text = Path.read_text
    won = []

    def read_slowly(path):
        text = read_text(path)
        time.sleep(random.uniform(0, 0.02))
        return text

    def contend(path):
        with contextlib.suppress(BlockingIOError):
            won.append((path.parent, FileLock(path)))

    folders = [tmp_path / str(number) for number in range(8)]
    for folder in folders:
        folder.mkdir()
        dead = f"process {2**22} on {os.uname().nodename} {folder.name}"
        (folder / ".lock.owner").write_text(dead)
    monkeypatch.setattr(Path, "read_text", read_slowly)
    many = [threading.Thread(target=contend, args=(f / ".lock",)) for f in folders * 6]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    assert sorted(folder for folder, _ in won) == folders
    assert all(lock.is_held() for _, lock in won)
    assert all({path.name for path in f.iterdir()} == {".lock", ".lock.owner"} for f in folders)


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
