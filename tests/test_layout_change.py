"""A run may change ranks, tensor parallelism and ZeRO stage at every stop; results stay.

Six legs of two steps are compared with one process that trains without a stop.
"""

import pytest
import torch

from tests.legs import ALONE, KINDS, Leg, run_legs
from tests.reference import update_error

STEPS_PER_LEG = 2
LEGS = (
    Leg(stage=1, data_parallel=2),
    Leg(stage=2, data_parallel=1),  # DP 2 -> 1, ZeRO 1 -> 2
    Leg(stage=3, data_parallel=2),  # DP 1 -> 2, ZeRO 2 -> 3
    Leg(stage=0, data_parallel=4),  # DP 2 -> 4, ZeRO 3 -> 0
    Leg(stage=1, data_parallel=2, tensor_parallel=2),  # TP 1 -> 2, ZeRO 0 -> 1
    Leg(stage=3, data_parallel=2),  # TP 2 -> 1
)


@pytest.fixture(scope="module")
def legs(data, tmp_path_factory):
    """The outcomes of every rank of every leg, and of one process without a stop."""
    folder = tmp_path_factory.mktemp("runs")
    changed = run_legs(LEGS, data, folder / "changed", steps=STEPS_PER_LEG)
    ((whole,),) = run_legs([ALONE], data, folder / "whole", steps=STEPS_PER_LEG * len(LEGS))
    return changed, whole


def test_the_curve_and_the_weights_are_those_of_the_run_that_changed_nothing(legs):
    changed, whole = legs
    losses = [loss for ranks in changed for loss in ranks[0].losses]
    assert losses == pytest.approx(whole.losses, rel=1e-5)
    assert losses[-1] < losses[0]  # it moved
    initial = whole.start["weights.safetensors"]
    for kind in ("weights.safetensors", "average.safetensors"):
        assert update_error(changed[-1][0].end[kind], whole.end[kind], initial) < 1e-5


def test_every_leg_starts_from_every_bit_that_the_one_before_left(legs):
    changed, _ = legs
    for before, after in zip(changed, changed[1:], strict=False):
        left = before[0].end
        read = after[0].start
        for kind in KINDS:
            for name, tensor in left[kind].items():
                assert torch.equal(read[kind][name], tensor), (kind, name)


def test_no_sample_is_repeated_and_none_is_skipped(legs):
    changed, whole = legs
    step = 0
    for ranks in changed:
        for at in range(STEPS_PER_LEG):
            parts = [rank.seen[at] for rank in ranks if rank.tp_rank == 0]
            assert sorted(i for part in parts for i in part) == list(range(8 * step, 8 * step + 8))
            assert sorted(whole.seen[step]) == list(range(8 * step, 8 * step + 8))
            step += 1
        # Tensor-parallel peers read the same samples.
        first = [rank.seen for rank in ranks if rank.tp_rank == 0]
        assert all(rank.seen in first for rank in ranks)
