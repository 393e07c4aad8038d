"""One optimizer step costs one reduction of the unique parameters: every byte is counted.

The formulas are written out here; `P` is the number of unique parameters, 4 bytes each in fp32.
"""

from dataclasses import replace

from albert_ds.model.arithmetic import count_params
from tests.batches import random_samples
from tests.distributed import run_ranks
from tests.training import SMALL, join, open_small_run, small_config

BATCHES = [
    random_samples(16, vocab_size=SMALL.vocab_size, max_length=32, seed=seed) for seed in range(3)
]


def measure(rank: int, configs, batches):
    """Traffic of one step of each config, by collective."""
    from albert_ds.train import next_batch, train_step

    joined = join(1)
    traffic = joined[2]
    moved = []
    for config in configs:
        run = open_small_run(config, batches, *joined)
        for _ in batches:
            batch = next_batch(run)
            before = traffic.copy()
            train_step(run, batch)
        step = traffic - before
        moved.append((dict(step.calls), dict(step.bytes)))
    return moved


def test_bytes_of_a_step():
    deep = replace(SMALL, num_layers=6)  # shared: as many parameters as with 3 layers
    configs = [
        small_config(world_size=2, model=model, batch_size=16, ds_changes=changes)
        for model in (SMALL, deep)
        for changes in (
            {"zero_optimization": {"stage": 0}},
            {"zero_optimization": {"stage": 1}},
        )
    ]
    shallow0, shallow1, deep0, deep1 = run_ranks(measure, 2, configs, BATCHES)[0]
    parameters = sum(count_params(SMALL).values())
    gradients = 4 * parameters
    # ZeRO-0: the gradients once, after 4 micro-batches, and small vectors.
    calls, moved = shallow0
    assert set(calls) == {"all_reduce"}
    assert gradients <= moved["all_reduce"] <= gradients * 1.02
    # ZeRO-1: the same reduction, and one gather of the updated weights (padded to 2 ranks).
    calls, moved = shallow1
    assert gradients <= moved["all_reduce"] <= gradients * 1.02
    assert gradients <= moved["all_gather_into_tensor"] <= gradients * 1.001
    # A block used six times is reduced once.
    assert (deep0, deep1) == (shallow0, shallow1)


def test_lamb_adds_one_small_reduction_over_the_adapted_group():
    configs = [
        small_config(
            world_size=2,
            batch_size=16,
            ds_changes={"optimizer": {"type": name, "params": {"lr": 0.01}}},
        )
        for name in ("Lamb", "AdamW")
    ]
    (lamb_calls, lamb), (adamw_calls, adamw) = run_ranks(measure, 2, configs, BATCHES)[0]
    assert lamb_calls["all_reduce"] - adamw_calls["all_reduce"] == 1
    # word, type, position, projection; q, k, v, output, up, down; pooler, MLM transform, pair head
    adapted = 13
    assert lamb["all_reduce"] - adamw["all_reduce"] == 2 * 8 * adapted  # two float64 sums each
