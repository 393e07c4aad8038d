"""Two trainings that are equal: one is not cut, the other goes on after every cut.

A `Case` says after which steps, by which fault, and in which layout each part runs, which is a leg.
Every leg is a command that a user types.
"""

import hashlib
import json
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from albert_ds.checkpoint.folder import AVERAGE, FILES, WEIGHTS, Checkpoint
from tests.command import kill_after, run_command
from tests.conftest import finish, start_ranks, train_command
from tests.distributed import end_ranks, run_ranks
from tests.finetuning import flags
from tests.reference import update_error
from tests.runs import DS_CONFIGS, gather

KINDS = (*FILES, AVERAGE)
TRAINERS = {
    "train": lambda *given, **config: train_command(*given, **config)[2:],
    "finetune": flags,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How many ranks share a training, and what of it."""

    stage: int | None = None  # of ZeRO, in fp32; None: what the flags say
    data_parallel: int = 1
    tensor_parallel: int = 1

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.tensor_parallel


ALONE = Layout()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A training that is cut, once or more often."""

    config: dict  # flags of the trainer
    cuts: tuple[int, ...]  # the steps after which it is cut
    fault: Callable = kill_after  # or another of tests/command.py, `rewind`, `stop_after`
    layout: Layout = ALONE  # of the training that is not cut
    legs: tuple[Layout, ...] = ()  # of each part of the other; (): `layout` for all
    trainer: str = "train"


class Watched(NamedTuple):
    """What one rank saw of a leg, if the fault is `stop_after`."""

    tp_rank: int
    seen: list[list[int]]  # of each step the numbers of this rank's samples
    start: dict[str, dict[str, Tensor]]  # by kind and name; on rank 0


class Pair(NamedTuple):
    """The folders of both runs, and what their ranks saw: of the whole one, then of each leg."""

    whole: Path
    cut: Path
    watched: list[list[Watched]]


def rewind(run: Path, step: int) -> None:
    """Leave of a run what it had after a step, but for its metrics."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)


def run_case(case: Case, *given, folder: Path) -> Pair:
    """Train both ways, and compare: every bit, or the curve and the weights in other layouts.

    `given` is the data, of a task also its name and the checkpoint. Cases of one folder share the
    run that is not cut.
    """
    assert not case.legs or case.fault is stop_after
    whole = folder / "whole"
    cut = folder / f"cut-{'-'.join(map(str, case.cuts))}"
    watched = []
    if not whole.exists():
        watched.append(run_leg(case, case.layout, None, *given, whole))
    legs = case.legs or (case.layout,) * (len(case.cuts) + 1)
    for layout, step in zip(legs, (*case.cuts, None), strict=True):
        if step and case.fault is rewind:
            rewind(shutil.copytree(whole, cut), step)
        else:
            watched.append(run_leg(case, layout, step, *given, cut))
        if step and case.fault not in (rewind, stop_after):
            assert not any((cut / name).exists() for name in ("exit.json", "results.json"))
            logged = records(cut)
            assert logged == records(whole)[: len(logged)] and logged[-1]["step"] == step
    if case.legs:
        assert losses_of(cut) == pytest.approx(losses_of(whole), rel=1e-6)
        initial = watched[-1 - len(case.cuts)][0].start[WEIGHTS]
        last = case.config["steps"]
        trained, reference = (read_step(run, last, WEIGHTS) for run in (cut, whole))
        assert update_error(trained, reference, initial) < 1e-5
    else:
        assert records(cut) == records(whole)
        assert files_of(cut / "checkpoints") == files_of(whole / "checkpoints")
    return Pair(whole, cut, watched)


def run_leg(case: Case, layout: Layout, step: int | None, *given) -> list[Watched]:
    """One command on the ranks of a layout, to the step that ends it or (None) to the end."""
    config = dict(case.config)
    if layout.stage is not None:
        ds_config = json.loads((DS_CONFIGS / "zero1_fp32.json").read_text())
        ds_config["zero_optimization"] |= {"stage": layout.stage}
        config["deepspeed_config"] = given[-1].with_name(f"zero{layout.stage}.json")
        config["deepspeed_config"].write_text(json.dumps(ds_config))
    if layout.tensor_parallel > 1:
        config["tensor_parallel"] = layout.tensor_parallel
    words = words_of(case.trainer, *given, **config)
    if case.fault is stop_after:
        return run_ranks(stop_after, layout.ranks, words, step)
    if step is None:
        run_trainer(case.trainer, *given, ranks=layout.ranks, **config)
    else:
        killed = end_ranks(case.fault, layout.ranks, words, step)
        assert killed == [-signal.SIGKILL] * layout.ranks
    return []


def stop_after(rank: int, words: list, step: int | None) -> Watched:
    """A pretraining on one rank, for `run_ranks`; it is asked to stop after this step."""
    from albert_ds.training import pretrain as loop

    started, seen = [], []

    def prepare(config, opened, mesh, *more, prepare=loop.prepare):
        run = prepare(config, opened, mesh, *more)
        start = {kind: gather(run.engine, kind) for kind in KINDS}
        started.append(Watched(mesh.tp_rank, seen, start))
        return run

    def next_batch(run, *, ahead=0, stop=False, next_batch=loop.next_batch):
        is_last = run.step + ahead == step
        batch = next_batch(run, ahead=ahead, stop=stop or is_last)
        if not is_last:
            seen.append([i for part in batch.micro_batches for i in part.sample_ids])
        return batch

    loop.prepare, loop.next_batch = prepare, next_batch
    done = run_command(*words)
    assert done.code == (75 if step else 0), done.err
    return started[0]


def words_of(trainer: str, *given, **config) -> list[str]:
    """What is typed behind `albert-ds`: as `train_command` and `flags` take it."""
    return [trainer, *TRAINERS[trainer](*given, **config)]


def run_trainer(trainer: str, *given, ranks: int = 1, **config) -> None:
    """`train` or `finetune` to its end."""
    words = words_of(trainer, *given, **config)[1:]
    command = [sys.executable, f"albert_ds/{trainer}.py", *words]
    assert finish(start_ranks(command, ranks)) == [0] * ranks


pretrain, tune = (partial(run_trainer, trainer) for trainer in TRAINERS)


def records(run: Path) -> list[dict]:
    """metrics.jsonl without the keys that depend on the clock."""
    clock = ("seconds", "per_second", "wait")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not any(word in k for word in clock)}
        for line in lines
    ]


def files_of(folder: Path) -> dict[str, str]:
    """The checksum of every file below it, by name; but those that a kill left half written."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        if not name.startswith(".")
    }


def losses_of(run: Path) -> list[float]:
    """Of each step."""
    return [record["loss"] for record in records(run) if "samples" in record]


def read_step(run: Path, step: int, kind: str) -> dict[str, Tensor]:
    """A file of the checkpoint of a step."""
    return Checkpoint(run / "checkpoints" / f"step-{step:08d}").read(kind)
