"""Shards on a disk of the node: whole, copied once, and used by a run and by its resumption."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.data import staging
from albert_ds.data.staging import copy_folders, find_copy
from tests.command import run_command
from tests.conftest import start_ranks, train_command
from tests.data.test_storage import Server
from tests.distributed import run_ranks

# torch for CUDA says so where nvcc is installed, and a user without a GPU should know.
NO_GPU = "No CUDA runtime is found"


@pytest.fixture
def disk(tmp_path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def files_of(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def shard_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_copy_is_whole_and_made_once(data, disk, scheme):
    assert sum(copy_folders([f"{scheme}{data}"], disk)) == shard_bytes(data)
    (copy,) = disk.iterdir()
    index = (data / "index.json").read_bytes()
    assert copy.name == hashlib.sha256(index).hexdigest()[:16]
    copied, source = files_of(copy), files_of(data)
    assert copied == {name: source[name] for name in copied}
    assert source.keys() - copied.keys() <= {"tokenizer.json"} and copy == find_copy(
        str(data), disk
    )
    times = {path: path.stat().st_mtime_ns for path in copy.glob("*.tar")}
    assert sum(copy_folders([str(data)], disk)) == 0
    assert times == {path: path.stat().st_mtime_ns for path in copy.glob("*.tar")}


def test_a_damaged_copy_of_a_shard_is_copied_again(data, disk):
    list(copy_folders([str(data)], disk))
    copy = find_copy(str(data), disk)
    before, (shard, *_) = files_of(copy), sorted(copy.glob("train-*.tar"))
    content = shard.read_bytes()
    for damage in (
        lambda: shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1])),
        lambda: os.truncate(shard, 1000),
        shard.unlink,
    ):
        damage()
        assert sum(copy_folders([str(data)], disk)) == len(content)
        assert files_of(copy) == before


def test_a_damaged_source_is_not_copied(data, disk, tmp_path):
    damaged = shutil.copytree(data, tmp_path / "damaged")
    shard = damaged / "train-000000.tar"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedData, match=str(shard)):
        list(copy_folders([str(damaged)], disk))
    assert not list(disk.glob("*/train-000000.tar")) and not list(disk.glob("*/index.json"))


def test_too_little_space_is_refused_before_anything_is_written(data, disk, monkeypatch):
    free = shard_bytes(data) - 1
    monkeypatch.setattr(
        staging.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free)
    )
    with pytest.raises(UserError, match=f"--stage {disk}: .* GB are free on {os.uname().nodename}"):
        list(copy_folders([str(data)], disk))
    assert not list(disk.iterdir())


def test_another_process_is_waited_for(data, disk, monkeypatch):
    monkeypatch.setattr(staging, "PAUSE", 0.0)
    lock = os.open(disk, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    copying = copy_folders([str(data)], disk)
    assert [next(copying) for _ in range(3)] == [0, 0, 0] and not list(disk.iterdir())
    os.close(lock)
    assert sum(copying) == shard_bytes(data)


def stage_as(rank: int, data: str, cases: list) -> list[tuple[bool, str]]:
    """Of each case: whether this rank copied, and where it will read or why it ended.

    A case has the --stage and the host of each rank.
    """
    from dataclasses import replace

    from albert_ds.training import pretrain as train
    from tests.runs import join, small_config

    _, mesh, _ = join(1)
    asked, found = [], []

    def copy(folders: list[str], stage: Path):
        asked.append(stage)
        return copy_folders(folders, stage)

    train.copy_folders = copy
    for disks, hosts in cases:
        asked.clear()
        train.gather_hosts = lambda mesh, hosts=hosts: hosts
        config = replace(small_config(world_size=2), data=[data], stage=str(disks[rank]))
        try:
            place = train.stage(config, mesh).data[0]
        except UserError as error:
            place = str(error)
        found.append((bool(asked), place))
    return found


def test_each_node_copies_once_and_one_without_the_folder_ends_all_ranks(data, tmp_path):
    one, two, missing = (tmp_path / name for name in ("one", "two", "missing"))
    one.mkdir(), two.mkdir()
    cases = [([one] * 2, ["a", "a"]), ([two] * 2, ["a", "b"]), ([one, missing], ["a", "b"])]
    by_rank = run_ranks(stage_as, 2, str(data), cases)
    together, apart, refused = zip(*by_rank, strict=True)
    for disk, found, who in ((one, together, [True, False]), (two, apart, [True, True])):
        assert [is_copying for is_copying, _ in found] == who
        assert {folder for _, folder in found} == {str(find_copy(str(data), disk))}
        assert files_of(find_copy(str(data), disk)).items() <= files_of(data).items()
    wanted = f"--stage {missing}: must be a folder; there is none on {os.uname().nodename}"
    assert [message for _, message in refused] == [wanted] * 2


def test_a_run_stages_and_a_resumed_one_reads_the_copy(data, disk, tmp_path):
    """Also: a sound run shows its own lines only, and ends with what to do next."""
    source, run = shutil.copytree(data, tmp_path / "source"), tmp_path / "run"
    flags = {"stage": disk, "eval_every": 4, "save_every": 4}
    for steps, ranks, copied in ((4, 2, shard_bytes(data)), (8, 1, 0)):
        processes = start_ranks(train_command(source, run, **flags, steps=steps), ranks)
        said = [process.communicate(timeout=500) for process in processes]
        assert [process.returncode for process in processes] == [0] * ranks, said
        errors = "".join(error for _, error in said).splitlines()
        errors = [line for line in errors if NO_GPU not in line]
        assert f" {copied / 1e6:,.1f} MB copied" in errors[0]
        assert all(line.startswith("albert-ds: ") for line in errors), errors
        lines = said[0][0].splitlines()
        assert lines[0] == f"pretraining: {run}, {steps - 4} of {steps} steps done"
        assert lines[-1].startswith("  export ") and str(run) in lines[-1]
        assert all(len(line) <= 120 for line in lines if line.startswith("step"))
        for shard in source.glob("*.tar"):  # it is not read again
            os.truncate(shard, 1)
    config = json.loads((run / "config.json").read_text())
    assert config["data"] == [str(source)] and config["stage"] == str(disk)


def test_a_shard_that_a_server_lacks_is_named(data, disk, tmp_path):
    lacking = Path(shutil.copytree(data, tmp_path / "lacking"))
    (lacking / "train-000000.tar").unlink()
    with Server(lacking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = train_command(server.url, tmp_path / "run", steps=1)[2:]
        done = run_command("train", *words, "--stage", disk)
        server.shutdown()
    said = f"albert-ds: {server.url}/train-000000.tar: this shard of index.json is missing\n"
    assert (done.code, done.err) == (2, said)


def test_a_disk_without_locks_is_refused(data, disk, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("albert_ds.data.staging.fcntl.flock", refuse)
    with pytest.raises(UserError, match=f"--stage {disk}: no lock can be had there"):
        list(copy_folders([str(data)], disk))
