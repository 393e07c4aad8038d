"""Dropout changes no update in any layout: what is dropped follows the sample, not its company."""

from dataclasses import replace

import pytest
import torch

from tests.distributed import run_ranks
from tests.reference import update_error
from tests.runs import SMALL, Trained, small_batches, small_config, train_ranks

MODEL = replace(SMALL, dropout=0.3)
# Ranks, and of each run in them: tensor-parallel ranks, micro-batch, checkpointing.
LAYOUTS = {
    1: [(1, 8, "none"), (1, 2, "none"), (1, 4, "block")],
    2: [(1, 2, "none"), (1, 4, "attention")],
    4: [(2, 4, "none")],
}


def number(batches: list[list[dict]]) -> list[list[dict]]:
    """Samples with their place in the stream, as the loader gives it."""
    numbers = iter(range(10**6))
    return [[{**sample, "number": next(numbers)} for sample in batch] for batch in batches]


def train(world: int, batches: list[list[dict]]) -> list[Trained]:
    configs = [
        small_config(
            world_size=world,
            tensor_parallel=tensor,
            micro_batch_size=micro,
            activation_checkpointing=checkpointing,
            model=MODEL,
        )
        for tensor, micro, checkpointing in LAYOUTS[world]
    ]
    return run_ranks(train_ranks, world, configs, batches)[0]


@pytest.fixture(scope="module")
def first() -> list[Trained]:
    return train(1, number(small_batches(3)))


@pytest.mark.parametrize("world", LAYOUTS)
def test_the_update_is_that_of_one_process_and_micro_batch(first, world):
    runs = first[1:] if world == 1 else train(world, number(small_batches(3)))
    for run in runs:
        assert update_error(run.weights, first[0].weights, first[0].initial) < 1e-5


def test_other_places_in_the_stream_give_another_update(first):
    """And so does torch's generator, which gives the seeds of samples without a place."""
    shifted = number(small_batches(3))
    for sample in shifted[0]:
        sample["number"] += 100
    config = small_config(world_size=1, micro_batch_size=8, model=MODEL)
    (other,) = run_ranks(train_ranks, 1, [config], shifted)[0]
    assert update_error(other.weights, first[0].weights, first[0].initial) > 1e-2


def test_heads_and_sites_of_a_sample_draw_apart():
    from albert_ds.model.attention import ShareDropout
    from albert_ds.model.draws import Draws
    from albert_ds.model.dropout import drop

    ends = torch.tensor([0, 40], dtype=torch.int32)
    ones = torch.ones(40, 40)
    draws = [Draws(torch.arange(40), ends, site=site) for site in (0, 1)]
    kept = [drop(ones, 0.5, each) > 0 for each in draws]
    shares = ones.expand(1, 3, 40, 40).contiguous()
    every = ShareDropout(draws[0], 0.5, 3, 0)
    heads = (every.of_one(shares, every.keys()[0])[0] > 0).unbind()
    kept += heads
    for number, one in enumerate(kept):
        for other in kept[:number]:
            assert abs((one & other).double().mean() - 0.25) < 0.05
    last = ShareDropout(draws[0], 0.5, 1, 2)  # a peer that has the third head alone
    assert torch.equal(last.of_one(shares[:, :1], last.keys()[0])[0, 0] > 0, heads[2])
