"""Position arithmetic. Which sample is where: test_golden.py."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from albert_ds.base.errors import UserError
from albert_ds.data.order import (
    BLOCK_SAMPLES,
    ROUND_SHARDS,
    ShardOrder,
    SourceOrder,
    count_quotas,
)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=20), st.integers(0, 2**60), st.integers(0, 3)
)
def test_an_epoch_has_every_sample_once_and_any_position_can_be_asked_for_first(
    sizes, seed, source
):
    sizes = np.array(sizes)
    total = int(sizes.sum())
    firsts = np.cumsum(sizes) - sizes
    order = ShardOrder(sizes, seed, source)
    places = [order.locate(position) for position in range(2 * total)]
    assert all(p.number == firsts[p.shard] + p.sample for p in places)
    for epoch in range(2):
        numbers = [place.number for place in places if place.epoch == epoch]
        assert sorted(numbers) == list(range(total))
    assert [place.epoch for place in places] == [0] * total + [1] * total
    for position in {0, total - 1, total, 2 * total - 1}:
        assert ShardOrder(sizes, seed, source).locate(position) == places[position]


def test_a_rank_needs_few_shards_of_a_round():
    order = ShardOrder(np.array([64] * ROUND_SHARDS), 0, 0)
    for dp_size in (2, 4, 8):
        shards = {order.locate(p).shard for p in range(1, 64 * ROUND_SHARDS, dp_size)}
        assert len(shards) == ROUND_SHARDS // dp_size


@settings(max_examples=8)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=5), st.integers(0, 2**32))
def test_mixture_is_exact_in_every_block(weights, seed):
    quotas = count_quotas(weights)
    shares = np.array(weights) / sum(weights) * BLOCK_SAMPLES
    assert sum(quotas) == BLOCK_SAMPLES
    assert (abs(np.array(quotas) - shares) < 1).all()
    order = SourceOrder(weights, seed)
    block = 3
    located = [order.locate(block * BLOCK_SAMPLES + i) for i in range(BLOCK_SAMPLES)]
    for source, quota in enumerate(quotas):
        local = [position for s, position in located if s == source]
        assert local == list(range(block * quota, (block + 1) * quota))


def test_a_share_too_small_for_a_block_is_refused():
    with pytest.raises(UserError, match="--data-weights .* no share may be under 1 in 10000"):
        count_quotas([1.0, 1e-7])
