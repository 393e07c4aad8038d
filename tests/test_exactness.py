"""Every mode gives the update of one float64 process; the short form of `make exactness`.

The modes contain every pair of values of two factors, so each layout meets each way of sharing,
clipping, accumulating and checkpointing.
"""

import statistics

import pytest

from tests.exactness.modes import Mode, all_pairs, crossed_modes, pairwise_modes, same_order
from tests.exactness.modes import _pairs as pairs_of
from tests.exactness.report import measure_rows
from tests.exactness.run import References, compare, train_all


@pytest.fixture(scope="module")
def outcomes():
    modes = pairwise_modes()
    modes += [Mode(grid=(1, 2), stage=stage, precision="bf16") for stage in (1, 2, 3)]
    modes += [same_order(mode) for mode in modes if mode.precision == "bf16"]
    return train_all(list(dict.fromkeys(modes)))


def test_the_slice_holds_every_pair():
    assert set().union(*map(pairs_of, pairwise_modes())) == all_pairs()
    assert len(crossed_modes()) == 5 * 4 * 2 * 2 * 2


def test_fp32_equals_float64_in_every_mode(outcomes):
    rows = [row for row in measure_rows(outcomes) if row.mode.precision == "fp32"]
    assert len(rows) >= 10
    for row in rows:
        assert row.off.loss < 1e-6, row
        assert row.off.norm < 1e-6, row
        assert row.off.gradient < 1e-4, row  # of tensors whose gradient nearly cancels
        assert row.off.parameter < 1e-5, row
        assert row.off.key_bias < 1e-6, row


def test_data_parallelism_and_zero_add_nothing_to_bf16(outcomes):
    # Against one process that takes the same micro-batches: 1 % of the rounding error at most.
    references, checked = References(), 0
    for mode in outcomes:
        if mode.precision == "fp32" or mode.tensor_parallel > 1 or mode.data_parallel == 1:
            continue
        alone = same_order(mode)
        own = compare(outcomes[alone], references.of(alone, outcomes[alone]))
        added = compare(outcomes[mode], outcomes[alone])
        assert added.overall <= 0.01 * own.overall, mode
        assert added.parameter <= 0.01 * own.parameter, mode
        checked += 1
    assert checked >= 5


def test_tensor_parallelism_is_no_further_from_float64_than_one_bf16_process(outcomes):
    # It rounds partial sums to bf16, so it differs from one process as both do from float64.
    references, ratios = References(), {}
    for mode in outcomes:
        if mode.precision == "fp32" or mode.tensor_parallel == 1:
            continue
        alone = same_order(mode)
        reference = references.of(alone, outcomes[alone])
        own = compare(outcomes[alone], reference)
        ratios[mode] = compare(outcomes[mode], reference).overall / own.overall
    assert len(ratios) >= 5
    assert max(ratios.values()) < 1.5, ratios
    assert statistics.median(ratios.values()) < 1.1, ratios
