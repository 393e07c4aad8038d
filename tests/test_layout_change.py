"""A run may change ranks, tensor parallelism and ZeRO stage at every stop; results stay.

Six legs of two steps, each in new processes and from the checkpoint of the leg before, are compared
with one process that trains without a stop. Both read the real stream. Dropout is off, because its
random numbers depend on the number of data-parallel ranks.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from albert_ds.checkpoint.folder import AVERAGE, FILES
from tests.distributed import run_ranks
from tests.reference import update_error
from tests.runs import SMALL, gather, join, open_named, small_config

STEPS_PER_LEG = 2
KINDS = (*FILES, AVERAGE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """A layout; a comment says what changes from the leg before."""

    stage: int
    data_parallel: int
    tensor_parallel: int = 1

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tensor_parallel


LEGS = (
    Leg(stage=1, data_parallel=2),
    Leg(stage=2, data_parallel=1),  # DP 2 -> 1, ZeRO 1 -> 2
    Leg(stage=3, data_parallel=2),  # DP 1 -> 2, ZeRO 2 -> 3
    Leg(stage=0, data_parallel=4),  # DP 2 -> 4, ZeRO 3 -> 0
    Leg(stage=1, data_parallel=2, tensor_parallel=2),  # TP 1 -> 2, ZeRO 0 -> 1
    Leg(stage=3, data_parallel=2),  # TP 2 -> 1
)


def config_of(leg: Leg, data: Path, vocab_size: int, output: Path):
    config = small_config(
        world_size=leg.world_size,
        tensor_parallel=leg.tensor_parallel,
        stage=leg.stage,
        model=replace(SMALL, vocab_size=vocab_size, max_position_embeddings=64),
        steps=STEPS_PER_LEG * len(LEGS),
        output=str(output),
    )
    stream = replace(config.stream, sequence_length=64)
    return replace(config, stream=stream, data=[str(data)], data_weights=[1.0], average=0.8)


def run_leg(rank: int, config, num_steps: int):
    """Continue RUN; returns losses, this rank's sample ids by step, tensors at start and end."""
    from albert_ds.checkpoint.gather import Saver
    from albert_ds.training.pretrain import next_batch, prepare, save, train_step

    device, mesh = join(config.tensor_parallel)
    run = prepare(config, open_named(config), mesh, device)
    start = {kind: gather(run.engine, kind) for kind in KINDS}
    config.run.mkdir(parents=True, exist_ok=True)
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
    return mesh.tp_rank, losses, seen, start, end


@pytest.fixture(scope="module")
def legs(data, tmp_path_factory):
    """Results of `run_leg` for every rank of every leg, and for one process without a stop."""
    from albert_ds.data.shards import open_shards

    vocab_size = open_shards(data, "train").vocab.size
    folder = tmp_path_factory.mktemp("runs")
    changed = [
        run_ranks(
            run_leg,
            leg.world_size,
            config_of(leg, data, vocab_size, folder / "changed"),
            STEPS_PER_LEG,
        )
        for leg in LEGS
    ]
    whole = config_of(Leg(stage=0, data_parallel=1), data, vocab_size, folder / "whole")
    return changed, run_ranks(run_leg, 1, whole, STEPS_PER_LEG * len(LEGS))[0]


def test_the_curve_and_the_weights_are_those_of_the_run_that_changed_nothing(legs):
    changed, (_, losses, _, start, end) = legs
    assert [loss for leg in changed for loss in leg[0][1]] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]  # it moved
    initial = start["weights.safetensors"]
    for kind in ("weights.safetensors", "average.safetensors"):
        assert update_error(changed[-1][0][4][kind], end[kind], initial) < 1e-5


def test_every_leg_starts_from_every_bit_that_the_one_before_left(legs):
    changed, _ = legs
    for before, after in zip(changed, changed[1:], strict=False):
        left, found = before[0][4], after[0][3]
        for kind in KINDS:
            for name, tensor in left[kind].items():
                assert torch.equal(found[kind][name], tensor), (kind, name)


def test_no_sample_is_repeated_and_none_is_skipped(legs):
    changed, (_, _, whole, _, _) = legs
    step = 0
    for ranks in changed:
        for at in range(STEPS_PER_LEG):
            parts = [seen[at] for tp_rank, _, seen, _, _ in ranks if tp_rank == 0]
            assert sorted(i for part in parts for i in part) == list(range(8 * step, 8 * step + 8))
            assert sorted(whole[step]) == list(range(8 * step, 8 * step + 8))
            step += 1
        # Tensor-parallel peers read the same samples.
        for tp_rank, _, seen, _, _ in ranks:
            assert tp_rank == 0 or seen in [other[2] for other in ranks if other[0] == 0]
