"""A full disk or a read-only folder ends the run with 5 and leaves saved checkpoints whole."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from albert_ds.checkpoint.folder import find_newest
from tests.conftest import finish, start_ranks, train_command
from tests.distributed import wait_for
from tests.legs import files_of, pretrain
from tests.test_resume import wait_for_step

needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def mount(*argv: str | Path) -> None:
    subprocess.run(["mount", *map(str, argv)], check=True)


def unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", path], check=True)


@needs_mounts
def test_a_full_disk_ends_with_5_and_names_what_is_needed_and_free(data, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m", "none", disk)
    try:
        # No line of metrics.jsonl, for which there may be no room while a save fails.
        flags = dict(steps=100, save_every=2, keep_last=50, eval_every=1000, log_every=1000)
        assert finish(start_ranks(train_command(data, disk / "run", **flags), 1)) == [5]
        ending = json.loads((disk / "run" / "exit.json").read_text())
        newest, damaged = find_newest(disk / "run")
        assert newest is not None and not damaged
        assert not list((disk / "run" / "checkpoints").glob(".*"))
        for words in ("bytes needed", "free", "No space left", f"untouched: step-{2:08d}"):
            assert words in ending["reason"], ending
        assert newest.name in ending["reason"]
        # With room again the same command goes on.
        mount("-o", "remount,size=64m", disk)
        pretrain(data, disk / "run", **flags | {"steps": 20})
    finally:
        unmount(disk)


@needs_mounts
def test_a_folder_that_turns_read_only_ends_with_5(data, tmp_path):
    run = tmp_path / "run"
    ranks = start_ranks(train_command(data, run, steps=100_000, save_every=5, keep_last=99), 1)
    wait_for_step(run, 8)
    folder = run / "checkpoints"
    mount("--bind", folder, folder)
    try:
        closing = ["mount", "-o", "remount,bind,ro", folder]  # refused while a file is written
        wait_for(lambda: subprocess.run(closing).returncode == 0, "a moment between two saves")
        before = {path.name: files_of(path) for path in folder.glob("step-*")}
        assert finish(ranks) == [5]
        ending = json.loads((run / "exit.json").read_text())
        assert "Read-only file system" in ending["reason"]
        assert {path.name: files_of(path) for path in folder.glob("step-*")} == before
        assert find_newest(run)[1] == []
    finally:
        unmount(folder)
