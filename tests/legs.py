"""A training in legs: each is another layout, and goes on from the checkpoint of the one before.

All read the real stream. What the last leg leaves is compared with a run of one leg.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from albert_ds.checkpoint.folder import AVERAGE, FILES
from albert_ds.data.shards import open_shards
from albert_ds.model.config import ModelConfig
from albert_ds.settings.pretrain import RunConfig
from tests.distributed import run_ranks
from tests.runs import SMALL, gather, join, open_named, small_config

KINDS = (*FILES, AVERAGE)


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
    losses: list[float]
    seen: list[list[int]]  # of each step the numbers of this rank's samples
    start: dict[str, dict[str, Tensor]]  # by kind and name; on rank 0
    end: dict[str, dict[str, Tensor]]


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
    output.mkdir(parents=True)
    whole = {"steps": steps * len(legs), **changes}
    return [
        run_ranks(run_leg, leg.world_size, config_of(leg, data, output, **whole), steps)
        for leg in legs
    ]


def run_leg(rank: int, config: RunConfig, num_steps: int) -> Outcome:
    """Continue RUN as one of its ranks."""
    from albert_ds.checkpoint.gather import Saver
    from albert_ds.training.pretrain import next_batch, prepare, save, train_step

    device, mesh = join(config.tensor_parallel)
    run = prepare(config, open_named(config), mesh, device)
    start = {kind: gather(run.engine, kind) for kind in KINDS}
    losses, seen = [], []
    for _ in range(num_steps):
        batch = next_batch(run)
        seen.append([i for part in batch.micro_batches for i in part.sample_ids])
        train_step(run, batch)
        losses.append(run.window.close(mesh, config.stream.objective)["loss"])
    saver = Saver(run.engine, run.config.run, keep_last=run.config.keep_last)
    save(run, saver)
    saver.wait()
    end = {kind: gather(run.engine, kind) for kind in KINDS}
    return Outcome(mesh.tp_rank, losses, seen, start, end)
