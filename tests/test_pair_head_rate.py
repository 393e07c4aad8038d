"""--pair-head-rate: exact in every layout, through stops, and nothing for the other weights."""

from dataclasses import replace

import pytest

from albert_ds.data.shards import open_shards
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.optim.lamb import decay_groups
from tests.distributed import run_ranks
from tests.reference import reference_training, update_error
from tests.test_layout_change import Leg, config_of, run_leg
from tests.training import SMALL, small_batches, small_config, train_ranks

SHARE = 0.1
LAYOUTS = [(stage, 1) for stage in (0, 1, 2, 3)] + [(1, 2), (3, 2)]  # ZeRO, tensor-parallel ranks


@pytest.fixture(scope="module")
def batches():
    return small_batches(4, max_length=24)


@pytest.fixture(scope="module", params=(1, 2), ids=lambda size: f"TP={size}")
def trained(request, batches):
    configs = [
        replace(
            small_config(
                world_size=2,
                tensor_parallel=request.param,
                stage=stage,
            ),
            pair_head_rate=SHARE,
        )
        for stage, size in LAYOUTS
        if size == request.param
    ]
    return configs, run_ranks(train_ranks, 2, configs, batches)[0]


def split(tensors: dict) -> tuple[dict, dict]:
    """Those of the pooler and the pair head, and all others."""
    slow = {name: x for name, x in tensors.items() if "pooler" in name or "pair_head" in name}
    return slow, {name: x for name, x in tensors.items() if name not in slow}


def test_updates_equal_float64_in_every_layout(trained, batches):
    configs, runs = trained
    rates = [configs[0].rate_at(step) for step in range(len(batches))]
    given = (SMALL, runs[0].initial, batches)  # all start from the same weights
    expected = reference_training(*given, rates=rates, pair_rate=SHARE)
    other = reference_training(*given, rates=rates)
    for found in runs:
        slow, others = split(expected.weights)
        assert update_error(found.weights, others, found.initial) <= 1e-5
        # They move a tenth as far, and fp32 rounds the weight, not the update.
        assert update_error(found.weights, slow, found.initial) <= 1e-5 / SHARE
        assert update_error(found.weights, other.weights, found.initial) > 0.5


def test_a_run_keeps_it_through_a_stop_and_another_layout(data, tmp_path):
    size = open_shards(data, "train").vocab.size

    def run(leg: Leg, name: str, steps: int):
        config = replace(config_of(leg, data, size, tmp_path / name), pair_head_rate=SHARE)
        return run_ranks(run_leg, leg.world_size, config, steps)[0]

    whole = run(Leg(stage=0, data_parallel=1), "whole", 4)
    run(Leg(stage=3, data_parallel=2), "legs", 2)
    last = run(Leg(stage=1, data_parallel=1, tensor_parallel=2), "legs", 2)
    for kind, tensors in whole[4].items():
        slow, others = split(tensors)
        assert update_error(last[4][kind], others, whole[3][kind]) <= 1e-5
        assert update_error(last[4][kind], slow, whole[3][kind]) <= 1e-5 / SHARE


def test_groups_hold_each_parameter_once_and_the_pair_head_apart():
    model = AlbertForPretraining(SMALL)
    plain, groups = (decay_groups(model.named_parameters(), 0.01, rate) for rate in (1.0, SHARE))
    assert [group["rate_share"] for group in plain] == [1.0, 1.0]
    names = {id(p): name for name, p in model.named_parameters()}
    held = [[names[id(p)] for p in group["params"]] for group in groups]
    assert sorted(sum(held, [])) == sorted(names.values())
    slow = split(dict(model.named_parameters()))[0]
    apart = {
        (group["adapt"], group["weight_decay"]): sorted(members)
        for group, members in zip(groups, held, strict=True)
        if group["rate_share"] == SHARE
    }
    assert apart == {
        (True, 0.01): sorted(name for name in slow if name.endswith("weight")),
        (False, 0.0): sorted(name for name in slow if name.endswith("bias")),
    }
    assert len(slow) == 4


def test_without_it_two_groups_hold_the_parameters_in_their_order():
    """ZeRO flattens a group in this order, so earlier runs go on with the same bits."""
    named = dict(AlbertForPretraining(SMALL).named_parameters())
    groups = decay_groups(named.items(), 0.01)
    plain = [name for name in named if "layer_norm" in name or name.endswith("bias")]
    for group, names in zip(groups, ([n for n in named if n not in plain], plain), strict=True):
        assert [id(p) for p in group["params"]] == [id(named[name]) for name in names]
