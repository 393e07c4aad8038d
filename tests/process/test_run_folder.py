"""A run whose folder is deleted, renamed, replaced or unmounted ends at once and mixes with no
other; what has taken a name that it needs is moved aside or named."""

import itertools
import json
import os
import shutil
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from albert_ds.checkpoint.folder import FILES, TrainState, find_newest, write_checkpoint
from albert_ds.errors import MachineFailed
from albert_ds.process.run_folder import RunLock
from albert_ds.report.metrics import Metrics
from tests.batches import random_samples
from tests.checkpoint.test_storage import mount, needs_mounts, one_tensor, state_at, unmount
from tests.conftest import start_ranks, train_command
from tests.distributed import run_ranks
from tests.test_resume import wait_for_step
from tests.training import SMALL, join, open_small_run, small_config

BATCHES = [
    random_samples(4, vocab_size=SMALL.vocab_size, max_length=32, seed=seed) for seed in range(3)
]


def replace_run(run: Path) -> RunLock:
    """Rename RUN away; another run starts at its path."""
    os.rename(run, run.with_name("renamed"))
    run.mkdir()
    return RunLock(run)


LOSSES = {
    "deleted": lambda run: shutil.rmtree(run, ignore_errors=True),  # something may be written
    "renamed": lambda run: os.rename(run, run.with_name("renamed")),
    "replaced": replace_run,
    "its lock deleted": lambda run: (run / ".lock").unlink(),
}


@pytest.mark.parametrize("how", LOSSES)
def test_a_run_that_has_lost_its_folder_writes_nothing_more_there(closed, tmp_path, how):
    run = tmp_path / "run"
    run.mkdir()
    lock = RunLock(run)
    closed.callback(lock.release)
    assert lock.find_loss() is None
    assert write_checkpoint(run, one_tensor(1), state_at(1), keep_last=1, keep_every=1) is None
    other = LOSSES[how](run)
    if other is not None:
        closed.callback(other.release)
    lost = lock.find_loss()
    assert isinstance(lost, MachineFailed) and str(run) in str(lost) and "\n" not in str(lost)
    before = sorted(tmp_path.rglob("*"))
    error = write_checkpoint(
        run, one_tensor(2), state_at(2), keep_last=1, keep_every=None, lock=lock
    )
    assert isinstance(error, MachineFailed) and str(error) == str(lost)
    assert sorted(tmp_path.rglob("*")) == before
    if other is not None:
        assert other.find_loss() is None and lock.find_loss() is not None


def test_a_child_of_the_owner_does_not_hold_the_lock(tmp_path):
    """A loader's worker outlives a trainer that was killed."""
    lock = RunLock(tmp_path)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        child = os.fork()
        if child == 0:
            mine.close()
            theirs.sendall(b"1")
            theirs.recv(1)  # until the parent has tried
            os._exit(0)
        mine.recv(1)
        lock.release()
        RunLock(tmp_path).release()
        mine.sendall(b"1")
        os.waitpid(child, 0)


@needs_mounts
def test_an_unmounted_run_is_lost(closed, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "none", run)
    lock = RunLock(run)
    closed.callback(lock.release)
    unmount(run)
    assert isinstance(lock.find_loss(), MachineFailed) and list(run.iterdir()) == []
    closed.callback(RunLock(run).release)  # another run may start on what lies below
    assert isinstance(lock.find_loss(), MachineFailed)


def test_a_run_that_is_gone_is_not_made_again(tmp_path):
    gone = tmp_path / "run"
    error = write_checkpoint(gone, one_tensor(1), state_at(1), keep_last=1, keep_every=None)
    assert isinstance(error, MachineFailed) and str(gone) in str(error)
    assert not gone.exists()


def train_and_lose(rank: int, folder: Path):
    """Lose RUN before step 4 in each way; how the training ended, and after how many steps."""
    from unittest.mock import patch

    from albert_ds.pretraining import loop as train

    joined, endings = join(1), {}
    for name, lose in LOSSES.items():
        config = small_config(world_size=1, batch_size=4, output=str(folder / name / "run"))
        config = replace(config, save_every=2, log_every=1)
        config.run.mkdir(parents=True)
        run = open_small_run(config, [], *joined)
        run.lock = RunLock(config.run)
        run.batches = itertools.cycle(open_small_run(config, BATCHES, *joined).batches)

        class Request:
            @property
            def reason(self, run=run, lose=lose):
                if run.step == 3 and not run.lock.find_loss():
                    while not (run.config.run / "checkpoints" / "latest").exists():
                        time.sleep(0.01)  # until step 2 is saved
                    self.other = lose(run.config.run)  # keeps the other's lock

        with patch.object(train, "evaluate", return_value={}):
            try:
                train.train(run, Request())
                ending = None
            except MachineFailed as error:
                ending = str(error)
        endings[name] = SimpleNamespace(ending=ending, step=run.step)
    return {name: endings[name] for name in LOSSES}


def test_training_ends_before_the_next_step(tmp_path):
    endings = run_ranks(train_and_lose, 1, tmp_path)[0]
    for name, found in endings.items():
        assert found.ending and str(tmp_path / name / "run") in found.ending, name
        assert found.step == 3
    kept, _ = find_newest(tmp_path / "renamed" / "renamed")
    assert kept is not None and kept.name == "step-00000002"
    assert not (tmp_path / "renamed" / "run").exists()
    new = tmp_path / "replaced" / "run"
    assert [path.name for path in new.iterdir()] == [".lock"]
    assert find_newest(tmp_path / "replaced" / "renamed")[0].name == "step-00000002"


def test_the_program_ends_with_5_one_line_and_leaves_the_new_run_alone(closed, data, tmp_path):
    run = tmp_path / "run"
    (process,) = start_ranks(train_command(data, run, steps=10**6, eval_every=10**6), 1)
    wait_for_step(run, 9)
    saved = run / "checkpoints" / "step-00000008"
    while not saved.exists():  # a thread writes it
        time.sleep(0.01)
    lost = time.monotonic()
    other = replace_run(run)
    closed.callback(other.release)
    out, err = process.communicate(timeout=120)
    print(err)
    assert process.returncode == 5 and time.monotonic() - lost < 60
    assert "Traceback" not in err and err.strip().splitlines()[-1].count(str(run)) >= 1
    assert [path.name for path in run.iterdir()] == [".lock"] and other.find_loss() is None
    newest, damaged = find_newest(run.with_name("renamed"))
    assert newest is not None and int(newest.name[5:]) >= 8 and not damaged


MESH = SimpleNamespace(rank=0)


@pytest.fixture
def closed():
    """What is put here is closed after the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_metrics(closed):
    def open_one(run: Path, step: int = 0, *, wandb: bool = False) -> Metrics:
        metrics = Metrics(run, MESH, step, num_steps=9, wandb=wandb)  # ty: ignore
        closed.callback(metrics._file.close)
        if "TensorBoard" in metrics._copies:
            closed.callback(metrics._copies["TensorBoard"].close)
        return metrics

    return open_one


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def scalars_of(run: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_tensorboard_shows_what_was_written_and_not_what_is_written_again(open_metrics, tmp_path):
    metrics = open_metrics(tmp_path)
    for step in (1, 2, 3):
        metrics.write(step, {"loss": step / 2, "none": None})
    resumed = open_metrics(tmp_path, 1)
    resumed.write(2, {"loss": 8.0})
    resumed.close()
    assert steps_of(tmp_path) == [1, 2]
    assert scalars_of(tmp_path, "loss") == [(1, 0.5), (2, 8.0)]


@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_a_board_without_its_folder_is_one_line_and_no_end(open_metrics, tmp_path, kind, capsys):
    taken = tmp_path / "tensorboard"
    taken.write_text("a note") if kind == "file" else taken.symlink_to(tmp_path / "nothing")
    metrics = open_metrics(tmp_path)
    metrics.write(1, {"loss": 1.0})
    metrics.close()
    assert steps_of(tmp_path) == [1]
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "TensorBoard failed" in line and str(taken) in line


class FakeWandb:
    """A package wandb that fails from its n-th call on."""

    def __init__(self, good_calls: int):
        self.left, self.logged = good_calls, []

    def _call(self):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no\nnetwork")

    def init(self, **settings):
        self._call()
        return self

    def log(self, numbers, step):
        self._call()
        self.logged.append((step, numbers))

    def finish(self):
        self._call()


@pytest.mark.parametrize("good_calls", range(5))
def test_weights_and_biases_may_fail_at_any_call(
    open_metrics, tmp_path, monkeypatch, capsys, good_calls
):
    library = FakeWandb(good_calls)
    monkeypatch.setitem(sys.modules, "wandb", library)
    metrics = open_metrics(tmp_path, wandb=True)
    for step in (1, 2):
        metrics.write(step, {"loss": 1.0})
    metrics.close()
    assert steps_of(tmp_path) == [1, 2]
    assert library.logged == [(step, {"loss": 1.0}) for step in (1, 2)][: max(0, good_calls - 1)]
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(said) == (good_calls < 4)
    assert not said or "Weights & Biases failed (no network)" in said[0]


def test_a_board_whose_disk_is_full_is_one_line_and_no_end(open_metrics, closed, tmp_path, capsys):
    metrics = open_metrics(tmp_path)
    board = metrics._copies["TensorBoard"]
    board.close()
    board._records = RecordWriter(closed.enter_context(open("/dev/full", "ab", buffering=0)))
    for step in (1, 2):
        metrics.write(step, {"loss": 1.0})
    assert steps_of(tmp_path) == [1, 2]
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "TensorBoard failed" in line and "No space left" in line


def test_metrics_that_cannot_be_written_are_named(open_metrics, closed, tmp_path):
    metrics = open_metrics(tmp_path)
    metrics._file = closed.enter_context(open("/dev/full", "ab", buffering=0))
    with pytest.raises(OSError, match="No space left") as caught:
        metrics.write(1, {"loss": 1.0})
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "link to a device"])
def test_what_has_the_name_of_the_metrics_is_moved_aside(open_metrics, tmp_path, kind, capsys):
    path = tmp_path / "metrics.jsonl"
    match kind:
        case "folder":
            path.mkdir()
            (path / "mine").touch()
        case "link to nothing":
            path.symlink_to(tmp_path / "nothing")
        case "link to a device":
            path.symlink_to("/dev/null")
    metrics = open_metrics(tmp_path)
    metrics.write(1, {"loss": 1.0})
    assert steps_of(tmp_path) == [1] and not (tmp_path / "nothing").exists()
    (aside,) = tmp_path.glob("metrics.jsonl.*")
    assert aside.name in capsys.readouterr().err
    assert aside.is_symlink() or (aside / "mine").exists()


def test_a_link_to_the_metrics_is_read_and_its_target_stays(open_metrics, tmp_path):
    target = tmp_path / "elsewhere"
    target.write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "metrics.jsonl").symlink_to(target)
    open_metrics(tmp_path, 1).write(2, {"loss": 1.0})
    assert steps_of(tmp_path) == [1, 2]
    assert target.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_defect_in_the_saving_thread_ends_the_run(tmp_path, monkeypatch):
    from albert_ds.checkpoint import gather as checkpoint

    def fail(*given, **how):
        raise ValueError("a defect")

    def pass_on(mesh, error):
        if error is not None:
            raise error

    monkeypatch.setattr(checkpoint, "write_checkpoint", fail)
    monkeypatch.setattr(checkpoint, "gather_all", lambda engine: {file: {} for file in FILES})
    monkeypatch.setattr(checkpoint, "raise_first_error", pass_on)
    config = SimpleNamespace(run=tmp_path, keep_last=1, keep_every=None)
    saver = checkpoint.Saver(SimpleNamespace(mesh=MESH), config, resumed_at=0)
    saver.save(TrainState(step=1, samples=1, updates=1, loss_scale=None))
    with pytest.raises(ValueError, match="a defect"):
        saver.wait()
