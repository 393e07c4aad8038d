"""One run of fine-tuning: its state, its start and its checkpoints.

OUTPUT/checkpoints/step-00000800/        for resuming: weights, moments, step
OUTPUT/checkpoints/best/                 the weights of the best evaluation
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.cli import log_line
from albert_ds.errors import MachineFailed, UserError
from albert_ds.finetuning.config import FinetuneConfig
from albert_ds.weights import BEST, NATIVE_FILE, read_encoder, read_model_vocab

if TYPE_CHECKING:
    import numpy as np
    import torch

    from albert_ds.model.task_heads import AlbertForTask
    from albert_ds.parallel.mesh import Mesh
    from albert_ds.runtime.engine import Engine
    from albert_ds.tasks.features import Split


@dataclass(kw_only=True, slots=True)
class Run:
    """Everything a step needs. A step changes `step`, `updates` and `skipped_in_a_row`."""

    config: FinetuneConfig
    splits: dict[str, Split]
    mesh: Mesh
    device: torch.device
    engine: Engine
    metric: str
    batches: Iterator[list[int]] = field(init=False)  # this rank's units, a list a step
    step: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0
    # (step, metric) of the dev set; NaN counts as the worst.
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def is_due(self, every: int) -> bool:
        """Whether work that is done every `every` steps, and at the last step, is due now."""
        return self.step % every == 0 or self.step == self.config.steps

    def __post_init__(self):
        self.batches = draw_units(self)

    @property
    def best(self) -> tuple[int, float]:
        """(step, metric) of the first of the best evaluations."""
        return max(self.evaluations, key=lambda e: e[1], default=(0, float("-inf")))

    @property
    def is_over(self) -> bool:
        """All steps are done, or none of the last `patience` evaluations was a new best."""
        patience = self.config.patience
        later = sum(step > self.best[0] for step, _ in self.evaluations)
        return self.step >= self.config.steps or (patience is not None and later >= patience)


def start(
    config: FinetuneConfig, splits: dict[str, Split], mesh: Mesh, device: torch.device
) -> Run:
    """Build the engine from the first of these that exists. Collective.

    1. The newest complete checkpoint of OUTPUT.
    2. The encoder of --from-task or --checkpoint, unless --from-scratch.
    3. Random weights.
    """
    from albert_ds.runtime import checkpoint
    from albert_ds.runtime.engine import build_engine
    from albert_ds.tasks.registry import TASKS

    folder = checkpoint.find_start(config.run, mesh)
    if folder is not None:
        weights = checkpoint.read_tensors(folder / NATIVE_FILE)
    else:
        weights = None if config.from_scratch else read_start(config, mesh)
    model = build_model(config, mesh, weights)
    engine = build_engine(model.to(device), mesh, config.deepspeed)
    metric = TASKS[config.task].metrics[0]
    run = Run(config=config, splits=splits, mesh=mesh, device=device, engine=engine, metric=metric)
    if folder is not None:
        state = checkpoint.restore(folder, engine)
        run.step, run.updates = state.step, state.updates
        if mesh.rank == 0:
            log_line(f"resuming from {folder}: step {state.step} of {config.steps}")
    return run


def read_start(config: FinetuneConfig, mesh: Mesh) -> dict:
    """The encoder to start from; UserError where --from-task has another shape or vocabulary."""
    folder = Path(config.from_task or config.checkpoint)
    found, weights = read_encoder(folder)
    for name in (f.name for f in fields(found) if f.name not in ("dropout", "pair_head")):
        theirs, ours = getattr(found, name), getattr(config.model, name)
        if theirs != ours:
            raise UserError(
                f"--from-task {folder}: its {name} is {theirs}, that of --checkpoint {ours}; they "
                "must be the same"
            )
    if config.from_task:
        if read_model_vocab(folder).sha256 != config.vocab_sha256:
            raise UserError(f"--from-task {folder}: has another vocabulary than --checkpoint")
    if config.model.pair_head and not found.pair_head and mesh.rank == 0:
        log_line(f"{folder} has no pooler: the pooler starts from random weights, like the head")
    return {n: x for n, x in weights.items() if config.model.pair_head or "pooler" not in n}


def build_model(config: FinetuneConfig, mesh: Mesh, weights: dict | None) -> AlbertForTask:
    """The model, or its tensor-parallel shard, on the host.

    `weights` may hold the encoder alone; other parameters keep their initialisation.
    """
    from albert_ds.model.task_heads import AlbertForTask
    from albert_ds.parallel.tensor import apply_tensor_parallel

    model = AlbertForTask(
        config.model,
        config.head,
        seed=config.seed,
        activation_checkpointing=config.activation_checkpointing,
    )
    if weights is not None:
        _, unknown = model.load_state_dict(weights, strict=False)
        assert not unknown, unknown
    apply_tensor_parallel(model, mesh)
    return model


def draw_units(run: Run) -> Iterator[list[int]]:
    """This rank's training units, step by step, without end."""
    while True:
        yield units_of_step(run)


def units_of_step(run: Run) -> list[int]:
    """This rank's training units of the next step. Every epoch has its own permutation."""
    config, units = run.config, run.splits["train"].features.units
    begin = run.step * config.batch_size
    positions = range(begin + run.mesh.dp_rank, begin + config.batch_size, run.mesh.dp_size)
    return [int(order_of(config.seed, p // units, units)[p % units]) for p in positions]


@lru_cache(maxsize=2)  # a step may span two epochs
def order_of(seed: int, epoch: int, units: int) -> np.ndarray:
    """The permutation of one epoch."""
    import numpy as np

    return np.random.default_rng([seed, epoch]).permutation(units)


def keep_best(run: Run) -> None:
    """Write OUTPUT/checkpoints/best atomically. Collective."""
    from safetensors.torch import save_file

    from albert_ds.runtime.checkpoint import gather
    from albert_ds.runtime.consensus import raise_first_error

    tensors, error = gather(run.engine, NATIVE_FILE), None
    path = run.config.run / BEST / NATIVE_FILE
    if run.mesh.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        except OSError as caught:
            error = MachineFailed(f"could not save {path} ({caught.strerror})")
    raise_first_error(run.mesh, error)


def save(run: Run) -> None:
    """Write a complete checkpoint of the current state. Collective."""
    from albert_ds.runtime.checkpoint import TrainState, read_loss_scale, save_checkpoint

    state = TrainState(
        step=run.step,
        samples=run.step * run.config.batch_size,
        updates=run.updates,
        loss_scale=read_loss_scale(run.engine),
    )
    save_checkpoint(run.config.run, run.engine, state, keep_last=1)
