"""Weights & Biases, offline, with the real package: it gets all numbers, and a run keeps its id."""

import contextlib
import io
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.distributed import run_ranks

wandb_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")


def train(rank: int, folder: Path) -> list[str]:
    """A run that is resumed, and those that lose the package: what each of these says."""
    import psutil
    import wandb

    from albert_ds.training.metrics import Metrics

    os.environ["WANDB_MODE"] = "offline"
    numbers = {"loss": 0.5, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0, "mfu": None}

    def run(name: str, first: int, last: int, killed_after: int | None = None) -> str:
        (folder / name).mkdir(exist_ok=True)
        mesh = SimpleNamespace(rank=0)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            metrics = Metrics(folder / name, mesh, first, num_steps=9, wandb=True)  # ty: ignore
            for step in range(first + 1, last + 1):
                metrics.write(step, {**numbers, "loss": step / 2})
                for child in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):  # its own child ends with it
                        if step == killed_after:  # the package's service
                            child.kill()
            metrics.close()
        return said.getvalue()

    run("run", 0, 2)
    run("run", 1, 3)
    (folder / "blocked").mkdir()
    (folder / "blocked" / "wandb").touch()  # where its folder is to be
    finish = wandb.Run.finish

    def fail(of_run) -> None:
        finish(of_run)
        raise OSError("no\nnetwork")

    with patch.object(wandb.Run, "finish", fail):
        said = [run("blocked", 0, 4), run("closed", 0, 4)]
    return [*said, run("killed", 0, 4, 1)]


def read_records(path: Path) -> list:
    """The protobuf records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    content = path.read_bytes()
    at = 7
    parts = b""
    records = []
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:  # no record begins in the last bytes of a block
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            records.append(wandb_pb2.Record.FromString(parts))
            parts = b""
    return records


def test_all_numbers_arrive_a_resumed_run_has_the_same_id_and_a_failure_is_one_line(tmp_path):
    (said,) = run_ranks(train, 1, tmp_path)
    ids = set()
    logged = []
    files = sorted(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))
    for path in files:
        for record in read_records(path):
            ids |= {record.run.run_id} - {""}
            items = {
                (i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item
            }
            if items:
                logged.append((items["_step"], {k: v for k, v in items.items() if k[0] != "_"}))
    rest = {"lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0}
    assert sorted(logged, key=lambda entry: entry[0]) == [
        (step, {"loss": step / 2, **rest}) for step in (1, 2, 2, 3)
    ]
    assert len(files) == 2 and ids == {(tmp_path / "run" / "wandb" / "id").read_text()}
    for name, words in zip(("blocked", "closed", "killed"), said, strict=True):
        assert words.count("Weights & Biases failed") == 1, (name, words)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
