"""No run starts over, goes back too far, or loses a checkpoint that it may need."""

import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from albert_ds.base.errors import Diverged, MachineFailed, UserError
from albert_ds.checkpoint.folder import (
    BEST,
    FILES,
    TrainState,
    find_newest,
    open_best,
    write_checkpoint,
    write_folder,
)
from albert_ds.settings.pretrain import read_config
from albert_ds.training.pretrain import write_run_files
from tests.conftest import finish, start_ranks, train_command
from tests.models import folder_of


def save(run: Path, step: int, *, keep_last=9, keep_every=None, value=1.0, lock=None) -> None:
    tensors = {file: {"x": torch.full((8,), value)} for file in FILES}
    state = TrainState(step=step, samples=step, updates=step, loss_scale=None)
    write_checkpoint(run, tensors, state, keep_last=keep_last, keep_every=keep_every, lock=lock)


def damage(folder: Path) -> None:
    """Flip a bit, long after the file was written."""
    path = folder / FILES[1]
    content = bytearray(path.read_bytes())
    now = path.stat().st_mtime_ns
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(now + 10**9, now + 10**9))


def contents(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder; links are not followed."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_the_program_ends_with_3_on_all_ranks_and_touches_nothing(data, tmp_path):
    run = tmp_path / "run"
    command = train_command(data, run, steps=2, save_every=1)
    assert finish(start_ranks(command, 2)) == [0, 0]
    for folder in (run / "checkpoints").glob("step-*"):
        damage(folder)
    before = contents(run / "checkpoints"), (run / "metrics.jsonl").read_bytes()
    assert finish(start_ranks(command, 2)) == [3, 3]
    assert (contents(run / "checkpoints"), (run / "metrics.jsonl").read_bytes()) == before
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 3 and "damaged" in ending["reason"]


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1),
    st.sampled_from([None, 2, 3]),
)
def test_as_many_stay_as_were_asked_for(saves, keep_every):
    """Saves of rising steps, with any number to keep."""
    without_disk = patch.object(os, "fsync", lambda number: None)
    with tempfile.TemporaryDirectory() as name, without_disk:
        run = Path(name)
        step = 0
        kept = set()
        for gap, keep_last in saves:
            step += gap
            save(run, step, keep_last=keep_last, keep_every=keep_every)
            kept.add(step)
            wanted = set(sorted(kept)[-keep_last:])
            wanted |= {step for step in kept if keep_every and step % keep_every == 0}
            kept = {step for step in kept if folder_of(run, step).exists()}
            assert kept == wanted


def test_a_damaged_checkpoint_is_written_again(tmp_path):
    for step in (30, 40):
        save(tmp_path, step)
    damage(folder_of(tmp_path, 40))
    assert find_newest(tmp_path)[0] == folder_of(tmp_path, 30)
    save(tmp_path, 40)
    assert find_newest(tmp_path) == (folder_of(tmp_path, 40), [])
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        *("latest", "step-00000030", "step-00000040"),
    }


def test_a_damaged_checkpoint_takes_no_other_ones_place(tmp_path):
    for step in (30, 40):
        save(tmp_path, step)
    damage(folder_of(tmp_path, 40))
    for step in (34, 38):  # the run goes on from 30
        save(tmp_path, step, keep_last=1)
        assert find_newest(tmp_path)[0] == folder_of(tmp_path, step)
    assert not folder_of(tmp_path, 34).exists()


def test_a_checkpoint_is_as_readable_as_any_new_file(tmp_path):
    save(tmp_path, 1)
    plain = tmp_path / "plain"
    plain.touch()
    files = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    assert len(files) > 3 and {path.stat().st_mode for path in files} == {plain.stat().st_mode}


def test_nine_digits_of_steps(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step, keep_last=1)
    assert find_newest(tmp_path) == (folder_of(tmp_path, 100_000_000), [])
    assert not folder_of(tmp_path, 99_999_999).exists()


def test_what_a_killed_save_left_is_cleared_away(tmp_path):
    left = tmp_path / "checkpoints" / ".step-00000003.tmp"
    left.mkdir(parents=True)
    (left / "weights.safetensors").write_bytes(b"half")
    name = left.with_name(".latest.0123abcd.partial")
    name.write_text("step-0")
    assert find_newest(tmp_path) == (None, [])
    save(tmp_path, 4)
    assert not left.exists() and not name.exists()


def test_what_somebody_keeps_in_a_checkpoint_outlives_it(tmp_path):
    save(tmp_path, 1)
    (folder_of(tmp_path, 1) / "notes.txt").write_text("the good one")
    for step in (2, 3):
        save(tmp_path, step, keep_last=1)
    assert [path.name for path in folder_of(tmp_path, 1).iterdir()] == ["notes.txt"]
    assert find_newest(tmp_path) == (folder_of(tmp_path, 3), [])
    (folder_of(tmp_path, 3) / "notes.txt").write_text("damaged")
    damage(folder_of(tmp_path, 3))
    save(tmp_path, 3)
    assert (folder_of(tmp_path, 3) / "notes.txt").read_text() == "damaged"
    assert find_newest(tmp_path) == (folder_of(tmp_path, 3), [])


def test_a_kill_at_any_moment_leaves_the_old_best_or_the_new_one(tmp_path):
    class Killed(BaseException):
        pass

    def write_best(run: Path, step: int) -> None:
        write_folder(run / BEST, {FILES[0]: {"x": torch.full((8,), float(step))}}, {"step": step})

    seen = set()
    moment = 1
    while moment is not None:
        run = tmp_path / str(moment)
        calls = 0
        run.mkdir()
        write_best(run, 1)

        def kill(call, *given, at=moment, **options):
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed
            return call(*given, **options)

        names = ("mkdir", "rename", "replace", "fsync", "rmdir", "unlink")
        with patch.multiple(os, **{name: partial(kill, getattr(os, name)) for name in names}):
            try:
                write_best(run, 2)
                moment = None
            except Killed:
                moment += 1
        best = open_best(run, {"x": (8,)})
        assert best is not None
        record = best.record
        weights = load_file(run / BEST / FILES[0])
        assert record["step"] in (1, 2) and (weights["x"] == record["step"]).all()
        seen.add(record["step"])
        write_best(run, 3)  # what the kill left is no obstacle
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best"]
    assert seen == {1, 2} and calls > 8


def lay_out_foreign(root: Path) -> None:
    """What a user may keep beside checkpoints under names that look like theirs."""
    good = root / "step-00000004"
    shutil.copytree(good, root / "step-best")
    shutil.copytree(good, root / "step-00000004-keep")
    shutil.copytree(good, root / "step-99")
    (root / "step-foo").mkdir()
    (root / "step-00000002").symlink_to(root / "step-best")
    (root / "step-99999999").symlink_to(root / "nothing")
    (root / "step-00000003").write_text("a note")
    (root / "best").mkdir()
    (root / "best" / FILES[0]).write_bytes(b"of fine-tuning")


@pytest.mark.parametrize("keep_every", [None, 4])
def test_what_a_run_did_not_write_is_left_alone(tmp_path, keep_every):
    root = tmp_path / "checkpoints"
    save(tmp_path, 4)
    lay_out_foreign(root)
    own_names = {"latest", *(f"step-{step:08d}" for step in (4, 8, 12))}

    def foreign() -> dict:
        return {k: v for k, v in contents(root).items() if k.split("/")[0] not in own_names}

    before = foreign()
    assert find_newest(tmp_path) == (folder_of(tmp_path, 4), [])
    for step in (8, 12):
        save(tmp_path, step, keep_last=1, keep_every=keep_every)
    assert find_newest(tmp_path) == (folder_of(tmp_path, 12), [])
    assert foreign() == before and (root / "step-foo").is_dir()
    assert folder_of(tmp_path, 8).exists() == (keep_every is not None)


def test_a_name_that_is_taken_is_said_and_left_alone(tmp_path):
    save(tmp_path, 4)
    folder_of(tmp_path, 8).write_text("a note")
    with pytest.raises(MachineFailed, match="step-00000004"):
        save(tmp_path, 8)
    assert folder_of(tmp_path, 8).read_text() == "a note"


def test_numbers_that_are_not_finite_are_never_saved(tmp_path):
    save(tmp_path, 1)
    for value in (float("nan"), float("-inf")):
        with pytest.raises(Diverged, match="step-00000001"):
            save(tmp_path, 2, keep_last=1, value=value)
        assert find_newest(tmp_path) == (folder_of(tmp_path, 1), [])


def test_checkpoints_without_the_configuration_of_their_run_are_refused(data, tmp_path):
    """A run would go on from them with another batch, order of the data or rate."""
    command = train_command(data, tmp_path, steps=9)[2:]
    save(tmp_path, 3)
    with pytest.raises(UserError, match="has checkpoints and no config.json"):
        read_config(command, world_size=1)


def test_a_second_start_on_a_fresh_run_cannot_mix_with_the_first(data, tmp_path):
    # Both read their command line before either has written RUN/config.json.
    run = tmp_path / "run"
    first = read_config(train_command(data, run, seed=1)[2:], world_size=1)
    second = read_config(train_command(data, run, seed=2)[2:], world_size=1)
    run.mkdir()
    write_run_files(*first)
    before = (run / "config.json").read_bytes()
    with pytest.raises(UserError, match="seed"):
        write_run_files(*second)
    assert (run / "config.json").read_bytes() == before
    write_run_files(*first)
