"""Every mode gives the update of one float64 process; a short form of `make exactness`.

The modes of `pairwise` contain every pair of values of two factors, so each layout meets each way
of sharing, clipping, accumulating and checkpointing. `short` has one mode of each stage, way of
cutting and precision.
"""

import statistics

import pytest
import torch

from tests.exactness.modes import LOOP, Mode, eight_bit_modes, pairwise_modes, same_order
from tests.exactness.one import is_within
from tests.exactness.report import measure_rows
from tests.exactness.run import References, compare, train_all

SHORT = [
    Mode(stage=0, sharing="pattern:0,0,1,0/0,1,1,2", checkpointing="attention", clipping=None),
    Mode(grid=(1, 2), stage=0, sharing="ffn", per_layer="norm,scale", accumulation=3),
    Mode(grid=(1, 2), stage=2, sharing="groups:2", checkpointing="block", resumed=True),
    Mode(grid=(1, 2), stage=3, sharing="none", per_layer="position,lora:2", objective="none"),
    Mode(grid=(2, 1), stage=1, sharing="cycle:3", per_layer="position,lora:2", accumulation=3),
    Mode(grid=(2, 1), stage=3, sharing="attention", per_layer="norm,scale", objective="nsp"),
    Mode(grid=(1, 2), stage=3, sharing=LOOP, per_layer="norm,inject", resumed=True),
    Mode(grid=(2, 1), stage=2, sharing=LOOP, per_layer="inject,lora:2"),
    Mode(grid=(4, 1), checkpointing="block"),
    *(  # layers that do not run, before and after they did
        Mode(depths=(3, 4, 3, 3, 4), sharing=LOOP, **layout)
        for layout in (
            dict(grid=(1, 2), stage=0, per_layer="norm,lora:2", accumulation=3),
            dict(grid=(1, 2), stage=1, per_layer="inject,lora:2", resumed=True),
            dict(grid=(1, 2), stage=2, per_layer="norm,lora:2"),
            dict(grid=(1, 2), stage=3, per_layer="norm,lora:2", accumulation=3),
            dict(grid=(2, 1), stage=3, per_layer="inject,lora:2", checkpointing="block"),
        )
    ),
    Mode(grid=(2, 1), stage=1, per_layer="norm,scale", depths=(4, 2, 2, 4, 4)),
    Mode(grid=(1, 2), stage=2, drawn="2-4", depths=(2, 3, 2, 3, 3), resumed=True),
    # Layer 0 alone: the gradients of its queries and keys are below Muon's least norm, 1e-7.
    Mode(grid=(1, 2), optimizer="Muon", sharing=LOOP, per_layer="norm,inject,lora:2"),
    Mode(grid=(1, 2), stage=3, exits=((1, 0.5), (3, 1.0)), depths=(2, 3, 4, 4, 4), accumulation=3),
    Mode(grid=(2, 1), stage=2, exits=((2, 2.0),), z_loss=0.1, checkpointing="block"),
    Mode(grid=(1, 2), z_loss=0.1, accumulation=3),
    Mode(grid=(1, 2), stage=3, teacher=0.5, z_loss=0.1, accumulation=3, resumed=True),
    Mode(grid=(2, 1), stage=2, teacher=2.0, exits=((2, 0.5),)),
    Mode(grid=(1, 2), stage=1, teacher=2.0, precision="bf16"),
    *(Mode(grid=(1, 2), stage=stage, precision="bf16") for stage in (1, 3)),
    Mode(grid=(2, 1), stage=2, precision="bf16", sharing="cycle-rev:2", checkpointing="block"),
    Mode(precision="fp8", sharing="cycle:3", checkpointing="block", resumed=True),
    Mode(grid=(1, 2), stage=2, precision="fp8", sharing="ffn", accumulation=3),
    Mode(grid=(1, 2), stage=3, precision="fp8", checkpointing="attention"),
]


@pytest.fixture(
    scope="module", params=["short", pytest.param("pairwise", marks=pytest.mark.nightly)]
)
def outcomes(request):
    modes = SHORT
    if request.param == "pairwise":
        modes = pairwise_modes()
        modes += [Mode(grid=(1, 2), stage=stage, precision="bf16") for stage in (1, 2, 3)]
        modes += eight_bit_modes()
    modes = modes + [same_order(mode) for mode in modes if mode.precision != "fp32"]
    return train_all(list(dict.fromkeys(modes)))


def test_fp32_equals_float64_in_every_mode(outcomes):
    rows = [row for row in measure_rows(outcomes) if row.mode.precision == "fp32"]
    assert len(rows) >= 6
    for row in rows:
        assert is_within(row.mode, row.off, None) and row.off.key_bias < 1e-6, row


def test_fp8_is_within_its_bound_and_resumes_bit_for_bit(outcomes):
    references = References()
    resumed = 0
    for mode in (mode for mode in outcomes if mode.precision == "fp8"):
        off = compare(outcomes[mode], references.of(mode, outcomes[mode]))
        assert is_within(mode, off, None), (mode, off)
        if mode.resumed:
            whole = outcomes[same_order(mode)].weights
            assert all(torch.equal(x, whole[n]) for n, x in outcomes[mode].weights.items()), mode
            resumed += 1
    assert resumed


def test_data_parallelism_and_zero_add_nothing_to_bf16(outcomes):
    # Against one process that takes the same micro-batches: 1 % of the rounding error at most.
    references = References()
    checked = 0
    for mode in outcomes:
        if mode.precision == "fp32" or mode.tensor_parallel > 1 or mode.data_parallel == 1:
            continue
        alone = same_order(mode)
        own = compare(outcomes[alone], references.of(alone, outcomes[alone]))
        added = compare(outcomes[mode], outcomes[alone])
        assert added.overall <= 0.01 * own.overall, mode
        assert added.parameter <= 0.01 * own.parameter, mode
        checked += 1
    assert checked >= 2


def test_tensor_parallelism_is_no_further_from_float64_than_one_bf16_process(outcomes):
    # It rounds partial sums to bf16, so it differs from one process as both do from float64.
    references = References()
    ratios = {}
    for mode in outcomes:
        if mode.precision == "fp32" or mode.tensor_parallel == 1:
            continue
        alone = same_order(mode)
        reference = references.of(alone, outcomes[alone])
        own = compare(outcomes[alone], reference)
        ratios[mode] = compare(outcomes[mode], reference).overall / own.overall
    assert ratios
    assert max(ratios.values()) < 1.5, ratios
    assert statistics.median(ratios.values()) < 1.1, ratios
