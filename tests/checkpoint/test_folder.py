"""A checkpoint is used, and counted, only where all of it fits the model; foreign files stay."""

import json
import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from albert_ds.checkpoint import folder as checkpoint_files
from albert_ds.checkpoint.folder import (
    FILES,
    TrainState,
    find_newest,
    read_best,
    write_checkpoint,
    write_folder,
)
from albert_ds.errors import DamagedData, UserError
from albert_ds.files import compute_crc32
from albert_ds.interop.weights import read_native

SHAPES = {"matrix": (2, 3), "vector": (4,)}


def save(run: Path, step: int, *, keep_last: int = 9):
    content = {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}
    state = TrainState(step=step, samples=step, updates=step, loss_scale=None)
    tensors = {file: content for file in FILES}
    return write_checkpoint(run, tensors, state, keep_last=keep_last, keep_every=None)


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def reseal(folder: Path, **changes) -> None:
    """Make state.json true of the files as they are now, with other values where given."""
    record = json.loads((folder / "state.json").read_text()) | changes
    record["crc32"] = {file: compute_crc32(folder / file) for file in record["crc32"]}
    del record["seal"]
    record["seal"] = checkpoint_files._seal(record)
    (folder / "state.json").write_text(json.dumps(record))


WRONG = {
    "missing": (lambda x: x.pop("vector"), "vector is missing"),
    "extra": (lambda x: x.update(other=torch.ones(1)), "other is no tensor of the model"),
    "transposed": (
        lambda x: x.update(matrix=x["matrix"].T.contiguous()),
        r"matrix is \(3, 2\), must be \(2, 3\)",
    ),
    "another size": (lambda x: x.update(vector=torch.ones(5)), r"vector is \(5,\), must be \(4,\)"),
    "another type": (lambda x: x.update(vector=x["vector"].half()), "vector is of type F16"),
    "whole numbers": (lambda x: x.update(vector=x["vector"].int()), "vector is of type I32"),
    "not a number": (lambda x: x["vector"].fill_(float("nan")), "vector is not finite"),
    "infinite": (lambda x: x["matrix"].view(-1)[-1:].fill_(-float("inf")), "matrix is not finite"),
}


@pytest.mark.parametrize("file", [FILES[0], FILES[2]])
@pytest.mark.parametrize("how", WRONG)
def test_what_does_not_fit_the_model_is_never_loaded_nor_counted(tmp_path, file, how):
    spoil, words = WRONG[how]
    for step in (1, 2):
        save(tmp_path, step)
    newest = folder_of(tmp_path, 2)
    content = load_file(newest / file)
    spoil(content)
    save_file(content, newest / file)
    reseal(newest)
    found, (line,) = find_newest(tmp_path, SHAPES)
    assert found == folder_of(tmp_path, 1) and "\n" not in line
    # It may be the only one that is left, and the next one must not push the good one out.
    assert save(tmp_path, 3, keep_last=2) is None
    assert folder_of(tmp_path, 1).exists()
    for step in (1, 3):
        checkpoint_files._delete(folder_of(tmp_path, step))
    with pytest.raises(DamagedData, match=f"step-00000002: {file}: {words}"):
        find_newest(tmp_path, SHAPES)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save(tmp_path, 1)
    assert find_newest(tmp_path, SHAPES) == find_newest(tmp_path) == (folder_of(tmp_path, 1), [])
    with pytest.raises(DamagedData, match=r"matrix is \(2, 3\), must be \(9, 3\)"):
        find_newest(tmp_path, SHAPES | {"matrix": (9, 3)})


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", 1), ("step", 2.5), ("samples", "2"), ("updates", -1), ("loss_scale", 3)],
)
def test_a_state_with_other_values_than_a_state_has(tmp_path, name, value):
    save(tmp_path, 2)
    reseal(folder_of(tmp_path, 2), **{name: value})
    with pytest.raises(DamagedData, match=f"state.json is damaged .*{name}"):
        find_newest(tmp_path, SHAPES)


def test_a_later_format_is_refused_and_the_first_one_named_none(tmp_path):
    save(tmp_path, 1)
    assert json.loads((folder_of(tmp_path, 1) / "state.json").read_text())["format"] == 1
    first = json.loads((folder_of(tmp_path, 1) / "state.json").read_text())
    del first["format"], first["seal"]
    first["seal"] = checkpoint_files._seal(first)
    (folder_of(tmp_path, 1) / "state.json").write_text(json.dumps(first))
    assert find_newest(tmp_path, SHAPES) == (folder_of(tmp_path, 1), [])
    save(tmp_path, 2)
    reseal(folder_of(tmp_path, 2), format=2)
    (tmp_path / "config.json").write_text('{"model": {}}')
    # It does not go back to step 1 either.
    for read in (find_newest, read_native):
        with pytest.raises(UserError, match="step-00000002/state.json: format 2; .* up to 1"):
            read(tmp_path)
    assert save(tmp_path, 3, keep_last=1) is None
    assert find_newest(tmp_path) == (folder_of(tmp_path, 3), [])


def test_what_somebody_keeps_in_a_checkpoint_outlives_it(tmp_path):
    save(tmp_path, 1)
    (folder_of(tmp_path, 1) / "notes.txt").write_text("the good one")
    for step in (2, 3):
        assert save(tmp_path, step, keep_last=1) is None
    assert [path.name for path in folder_of(tmp_path, 1).iterdir()] == ["notes.txt"]
    assert find_newest(tmp_path) == (folder_of(tmp_path, 3), [])


def test_names_that_are_taken_are_moved_aside(tmp_path, capsys):
    save(tmp_path, 1)
    root = tmp_path / "checkpoints"
    (root / "latest").unlink()
    (root / "latest").mkdir()
    (root / "latest" / "mine").touch()
    (root / ".step-00000002.tmp").write_text("a note")
    (root / ".step-00000002.old").symlink_to(folder_of(tmp_path, 1))
    (root / ".step-foo.tmp").mkdir()
    assert save(tmp_path, 2) is None
    assert find_newest(tmp_path) == (folder_of(tmp_path, 2), [])
    assert (root / "latest").read_text() == "step-00000002\n"
    said = capsys.readouterr().err
    for name in ("latest", ".step-00000002.tmp", ".step-00000002.old"):
        (aside,) = root.glob(f"{name}.*")
        assert aside.name in said
    assert (root / ".step-foo.tmp").is_dir() and find_newest(tmp_path, SHAPES)[1] == []


def test_a_file_where_the_checkpoints_go_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a note")
    with pytest.raises(UserError, match="checkpoints: is no folder"):
        find_newest(tmp_path)
    assert "File exists" in str(save(tmp_path, 1))


def test_nine_digits_of_steps(tmp_path):
    for step in (99_999_999, 100_000_000):
        assert save(tmp_path, step, keep_last=1) is None
    assert find_newest(tmp_path) == (folder_of(tmp_path, 100_000_000), [])
    assert not folder_of(tmp_path, 99_999_999).exists()


def write_best(run: Path, step: int) -> None:
    content = {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}
    write_folder(run / checkpoint_files.BEST, {FILES[0]: content}, {"step": step, "value": 0.5})


def test_a_kill_at_any_moment_leaves_the_old_best_or_the_new_one(tmp_path):
    class Killed(BaseException):
        pass

    seen, moment = set(), 1
    while moment is not None:
        run, calls = tmp_path / str(moment), 0
        run.mkdir()
        write_best(run, 1)

        def kill(call, *given, at=moment, **how):
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed
            return call(*given, **how)

        names = ("mkdir", "rename", "replace", "fsync", "rmdir", "unlink")
        with patch.multiple(os, **{name: partial(kill, getattr(os, name)) for name in names}):
            try:
                write_best(run, 2)
                moment = None
            except Killed:
                moment += 1
        found = read_best(run, SHAPES)
        assert found is not None
        step = found["step"]
        weights = load_file(run / checkpoint_files.BEST / FILES[0])
        assert step in (1, 2) and all((x == step).all() for x in weights.values())
        seen.add(step)
        write_best(run, 3)  # what the kill left is no obstacle
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best"]
    assert seen == {1, 2} and calls > 8


@pytest.mark.parametrize("how", ["a flipped bit", "not finite", "of another model", "no weights"])
def test_best_weights_that_are_not_whole_are_an_error(tmp_path, how):
    write_best(tmp_path, 1)
    path, shapes = tmp_path / checkpoint_files.BEST / FILES[0], SHAPES
    match how:
        case "a flipped bit":
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        case "not finite":
            save_file({name: torch.full(s, float("nan")) for name, s in SHAPES.items()}, path)
            reseal(path.parent)
        case "of another model":
            shapes = {**SHAPES, "matrix": (3, 2)}
        case "no weights":
            path.unlink()
    with pytest.raises(DamagedData, match="checkpoints/best: weights.safetensors"):
        read_best(tmp_path, shapes)


def test_best_weights_of_an_earlier_version_have_no_state(tmp_path):
    write_best(tmp_path, 1)
    (tmp_path / checkpoint_files.BEST / "state.json").unlink()
    assert read_best(tmp_path, SHAPES) == {}
    with pytest.raises(DamagedData, match="matrix"):
        read_best(tmp_path, {**SHAPES, "matrix": (3, 2)})
