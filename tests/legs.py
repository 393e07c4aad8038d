"""Two trainings that are equal: one is cut and goes on, the other is not.

A `Case` is a command that is killed, or goes on from an earlier checkpoint: every bit is the same.
A `Leg` is a layout, in which a training goes on from the checkpoint of the leg before.
"""

import hashlib
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from albert_ds.checkpoint.folder import AVERAGE, FILES
from albert_ds.data.shards import open_shards
from albert_ds.model.config import ModelConfig
from albert_ds.settings.pretrain import RunConfig
from tests.command import kill_after
from tests.conftest import finish, start_ranks, train_command
from tests.distributed import end_ranks, run_ranks
from tests.finetuning import flags
from tests.runs import SMALL, gather, join, open_named, save, small_config

KINDS = (*FILES, AVERAGE)
TRAINERS = {
    "train": lambda *given, **config: train_command(*given, **config)[2:],
    "finetune": flags,
}


def rewind(run: Path, step: int) -> None:
    """Leave of a run what it had after a step, but for its metrics."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A training that is cut after a step."""

    config: dict  # flags of the trainer
    cut_after: int
    fault: Callable = kill_after  # or another of tests/command.py, or `rewind`
    ranks: int = 1
    trainer: str = "train"


def run_case(case: Case, *given, folder: Path) -> tuple[Path, Path]:
    """The run that was not cut, and the one that was, which must leave the same; `given` is the
    data, of a task also its name and the checkpoint. Cases of one folder share the first run."""
    whole = folder / "whole"
    cut = folder / f"cut-{case.cut_after}"
    if not whole.exists():
        run_trainer(case.trainer, *given, whole, ranks=case.ranks, **case.config)
    if case.fault is rewind:
        rewind(shutil.copytree(whole, cut), case.cut_after)
    else:
        words = words_of(case.trainer, *given, cut, **case.config)
        killed = end_ranks(case.fault, case.ranks, words, case.cut_after)
        assert killed == [-signal.SIGKILL] * case.ranks
        assert not any((cut / name).exists() for name in ("exit.json", "results.json"))
        logged = records(cut)
        assert logged == records(whole)[: len(logged)] and logged[-1]["step"] == case.cut_after
    run_trainer(case.trainer, *given, cut, ranks=case.ranks, **case.config)
    assert records(cut) == records(whole)
    assert files_of(cut / "checkpoints") == files_of(whole / "checkpoints")
    return whole, cut


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """A layout."""

    stage: int
    data_parallel: int
    tensor_parallel: int = 1

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tensor_parallel


ALONE = Leg(stage=0, data_parallel=1)


class Outcome(NamedTuple):
    """What one rank saw of a leg."""

    tp_rank: int
    metrics: list[dict]  # of each step
    seen: list[list[int]]  # of each step the numbers of this rank's samples
    start: dict[str, dict[str, Tensor]]  # by kind and name; on rank 0
    end: dict[str, dict[str, Tensor]]

    @property
    def losses(self) -> list[float]:
        return [metrics["loss"] for metrics in self.metrics]


def config_of(
    leg: Leg, data: Path, output: Path, *, steps: int, model: ModelConfig = SMALL, **changes
) -> RunConfig:
    """A run of `steps` over built shards, whose vocabulary `model` gets."""
    vocab_size = open_shards(data, "train").vocab.size
    config = small_config(
        world_size=leg.world_size,
        tensor_parallel=leg.tensor_parallel,
        stage=leg.stage,
        model=replace(model, vocab_size=vocab_size, max_position_embeddings=64),
        steps=steps,
        output=str(output),
    )
    changes = {"average": 0.8, **changes}
    stream = replace(config.stream, sequence_length=64)
    return replace(config, stream=stream, data=[str(data)], data_weights=[1.0], **changes)


def run_legs(
    legs: Sequence[Leg], data: Path, output: Path, *, steps: int, **changes
) -> list[list[Outcome]]:
    """Train `steps` steps in each leg; the outcomes by leg and rank."""
    whole = {"steps": steps * len(legs), **changes}
    return [
        run_ranks(run_leg, leg.world_size, config_of(leg, data, output, **whole), steps)
        for leg in legs
    ]


def run_leg(rank: int, config: RunConfig, num_steps: int) -> Outcome:
    """Continue RUN as one of its ranks."""
    from albert_ds.training.pretrain import next_batch, prepare, train_step

    config.run.mkdir(parents=True, exist_ok=True)
    device, mesh = join(config.tensor_parallel)
    run = prepare(config, open_named(config), mesh, device)
    start = {kind: gather(run.engine, kind) for kind in KINDS}
    metrics, seen = [], []
    for _ in range(num_steps):
        batch = next_batch(run)
        seen.append([i for part in batch.micro_batches for i in part.sample_ids])
        train_step(run, batch)
        metrics.append(run.window.close(mesh, config.stream.objective))
    save(run)
    end = {kind: gather(run.engine, kind) for kind in KINDS}
    return Outcome(mesh.tp_rank, metrics, seen, start, end)
