"""One run of fine-tuning: its state, its start and its checkpoints.

OUTPUT/checkpoints/step-00000800/        for resuming: weights, moments, step
OUTPUT/checkpoints/best/                 the weights of the best evaluation, its step and value
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import NoneType

import numpy as np
import torch

from albert_ds.checkpoint.folder import BEST, WEIGHTS, read_best, read_tensors, write_folder
from albert_ds.checkpoint.gather import Saver, find_start, gather, restore
from albert_ds.cli import log_line
from albert_ds.engine.engine import Engine, build_engine
from albert_ds.errors import DamagedData, UserError
from albert_ds.interop.folder import ModelFolder
from albert_ds.json_files import read_lines
from albert_ds.model.shapes import build_shapes
from albert_ds.model.task_heads import AlbertForTask
from albert_ds.parallel.consensus import from_rank_0, raise_together
from albert_ds.parallel.mesh import Mesh
from albert_ds.process.run_folder import RunLock
from albert_ds.settings.finetune import FinetuneConfig
from albert_ds.tasks.features import Split
from albert_ds.tasks.registry import find_task

NO_BEST = (0, -math.inf)


@dataclass(kw_only=True, slots=True)
class Run:
    """Everything a step needs. A step changes `step`, `updates` and `skipped_in_a_row`.

    An evaluation changes `evaluations` and `best`, where NaN counts as the worst.
    """

    config: FinetuneConfig
    splits: dict[str, Split]
    mesh: Mesh
    device: torch.device
    engine: Engine
    metric: str
    batches: Iterator[list[int]]  # this rank's units, a list a step
    lock: RunLock | None = None  # on rank 0
    step: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0
    evaluations: list[int]  # their steps
    best: tuple[int, float] = NO_BEST  # step and metric of the first of the best evaluations

    def is_due(self, every: int) -> bool:
        """Whether work that is done every `every` steps, and at the last step, is due now."""
        return self.step % every == 0 or self.step == self.config.steps

    @property
    def is_over(self) -> bool:
        """All steps are done, or none of the last `patience` evaluations was a new best."""
        patience = self.config.patience
        later = sum(step > self.best[0] for step in self.evaluations)
        return self.step >= self.config.steps or (patience is not None and later >= patience)


def start(
    config: FinetuneConfig,
    splits: dict[str, Split],
    mesh: Mesh,
    device: torch.device,
    lock: RunLock | None = None,
) -> Run:
    """Build the engine from the first of these that exists. Collective.

    1. The newest complete checkpoint of OUTPUT.
    2. The encoder of --from-task or --checkpoint, unless --from-scratch.
    3. Random weights.
    """
    folder = find_start(config.run, mesh, build_shapes(config.model, config.head))
    if folder is not None:
        weights = read_tensors(folder / WEIGHTS)
    else:
        weights = None if config.from_scratch else read_start(config, mesh)
    model = build_model(config, mesh, weights)
    engine = build_engine(model.to(device), mesh, config.deepspeed)
    step = updates = 0
    if folder is not None:
        state = restore(folder, engine)
        step, updates = state.step, state.updates
        if mesh.rank == 0:
            log_line(f"resuming from {folder}: step {step} of {config.steps}")
    metric = find_task(config.task, config.head.labels).metrics[0]
    evaluations, best = restore_best(config, mesh, metric, step)
    return Run(
        config=config,
        splits=splits,
        mesh=mesh,
        device=device,
        engine=engine,
        metric=metric,
        batches=draw_units(config, splits["train"].features.units, mesh, step),
        lock=lock,
        evaluations=evaluations,
        best=best,
        step=step,
        updates=updates,
    )


def read_start(config: FinetuneConfig, mesh: Mesh) -> dict:
    """The encoder to start from; UserError if --from-task has another shape or vocabulary."""
    folder = ModelFolder(config.from_task or config.checkpoint, average=config.average)
    found, weights = folder.read_encoder()
    for name in (f.name for f in fields(found) if f.name not in ("dropout", "pair_head")):
        theirs, ours = getattr(found, name), getattr(config.model, name)
        if theirs != ours:
            raise UserError(
                f"--from-task {folder.path}: its {name} is {theirs}, that of --checkpoint {ours}; "
                "they must be the same"
            )
    if config.from_task:
        if folder.vocab.sha256 != config.vocab_sha256:
            raise UserError(f"--from-task {folder.path}: has another vocabulary than --checkpoint")
    if config.model.pair_head and not found.pair_head and mesh.rank == 0:
        log_line(
            f"{folder.path} has no pooler: the pooler starts from random weights, like the head"
        )
    return {n: x for n, x in weights.items() if config.model.pair_head or "pooler" not in n}


def build_model(config: FinetuneConfig, mesh: Mesh, weights: dict | None) -> AlbertForTask:
    """The model, or its tensor-parallel shard, on the host.

    `weights` may hold the encoder alone; other parameters keep their initialisation.
    """
    model = AlbertForTask(config.model, config.head, seed=config.seed)
    if weights is not None:
        _, unknown = model.load_state_dict(weights, strict=False)
        assert not unknown, unknown
    if mesh.tp_size > 1:
        from albert_ds.parallel.tensor import apply_tensor_parallel  # imports megatron-core

        apply_tensor_parallel(model, mesh)
    return model


def draw_units(config: FinetuneConfig, units: int, mesh: Mesh, step: int) -> Iterator[list[int]]:
    """This rank's training units, a list a step, after `step` finished ones and without end.

    Every epoch has its own permutation of the `units`.
    """
    for begin in count(step * config.batch_size, config.batch_size):
        positions = range(begin + mesh.dp_rank, begin + config.batch_size, mesh.dp_size)
        yield [int(order_of(config.seed, p // units, units)[p % units]) for p in positions]


@lru_cache(maxsize=2)  # a step may span two epochs
def order_of(seed: int, epoch: int, units: int) -> np.ndarray:
    """The permutation of one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(units)


def restore_best(
    config: FinetuneConfig, mesh: Mesh, metric: str, step: int
) -> tuple[list[int], tuple[int, float]]:
    """`evaluations` and `best` of a run that goes on after `step`. Collective.

    Raises DamagedData or UserError on all ranks if the best weights are gone or not whole.
    """
    found, best = {}, NO_BEST
    with raise_together(mesh):
        if mesh.rank == 0:
            record = read_best(config.run, build_shapes(config.model, config.head))
            found = read_evaluations(config.run / "metrics.jsonl", f"dev_{metric}", step)
            if record:  # it may be of an evaluation that came after the last checkpoint
                best = record["step"], -math.inf if record["value"] is None else record["value"]
            elif found:
                raise DamagedData(f"{config.run / BEST} is gone; move {config.run} away")
    return from_rank_0(mesh, (list(found), best))


def read_evaluations(path: Path, name: str, last: int) -> dict[int, float]:
    """The metric `name` of the dev set by step, up to the step `last`; NaN is the worst."""
    found, left_out = {}, 0
    for record in read_lines(path) if path.is_file() else ():
        value = record.get(name, math.nan)
        if type(value) not in (int, float, NoneType):
            left_out += 1
        elif name in record and record["step"] <= last:
            found[record["step"]] = -math.inf if value is None else value
    if left_out:
        log_line(f"{path}: {left_out} lines have no number as {name}; they are left out")
    return found


def keep_best(run: Run) -> None:
    """Write OUTPUT/checkpoints/best. Collective; raises Diverged or MachineFailed on all ranks."""
    tensors = {WEIGHTS: gather(run.engine, WEIGHTS)}
    step, value = run.best
    # JSON has no infinity.
    facts = {"step": step, "value": value if math.isfinite(value) else None}
    with raise_together(run.mesh):
        if run.mesh.rank == 0:
            write_folder(run.config.run / BEST, tensors, facts, run.lock)


def save(run: Run, saver: Saver) -> None:
    """Write a complete checkpoint of the current state, unless there is one. Collective."""
    samples = run.step * run.config.batch_size
    saver.save(step=run.step, samples=samples, updates=run.updates)
    saver.wait()  # the best weights are written to the same folder
