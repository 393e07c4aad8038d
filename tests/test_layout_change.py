"""A run may change ranks, tensor parallelism and ZeRO stage at every stop; results stay.

Six legs of two steps are compared with one process that trains without a stop.
"""

import pytest
import torch

from albert_ds.checkpoint.folder import AVERAGE
from tests.legs import KINDS, Case, Layout, losses_of, read_step, run_case, stop_after
from tests.reference import update_error

STEPS_PER_LEG = 2
CUTS = (2, 4, 6, 8, 10)
LEGS = (
    Layout(stage=1, data_parallel=2),
    Layout(stage=2, data_parallel=1),  # DP 2 -> 1, ZeRO 1 -> 2
    Layout(stage=3, data_parallel=2),  # DP 1 -> 2, ZeRO 2 -> 3
    Layout(stage=0, data_parallel=4),  # DP 2 -> 4, ZeRO 3 -> 0
    Layout(stage=1, data_parallel=2, tensor_parallel=2),  # TP 1 -> 2, ZeRO 0 -> 1
    Layout(stage=3, data_parallel=2),  # TP 2 -> 1
)
CONFIG = {
    **dict(steps=12, warmup_steps=2, learning_rate=0.01, average=0.8, keep_last=12),
    **dict(num_layers=3, num_heads=4, ffn_size=64, dropout=0),
}


@pytest.fixture(scope="module")
def pair(data, tmp_path_factory):
    """Both runs, whose curves and weights are equal."""
    case = Case(config=CONFIG, layout=Layout(stage=0), legs=LEGS, cuts=CUTS, fault=stop_after)
    return run_case(case, data, folder=tmp_path_factory.mktemp("runs"))


def test_the_average_is_that_of_the_run_that_changed_nothing(pair):
    initial = pair.watched[0][0].start[AVERAGE]
    average, reference = (read_step(run, 12, AVERAGE) for run in (pair.cut, pair.whole))
    assert update_error(average, reference, initial) < 1e-5


def test_every_leg_starts_from_every_bit_that_the_one_before_left(pair):
    for step, leg in zip(CUTS, pair.watched[2:], strict=True):
        for kind in KINDS:
            for name, tensor in read_step(pair.cut, step, kind).items():
                assert torch.equal(leg[0].start[kind][name], tensor), (kind, name)
    losses = losses_of(pair.cut)
    assert losses[-1] < losses[0]  # it moved


def test_no_sample_is_repeated_and_none_is_skipped(pair):
    whole, *legs = pair.watched
    step = 0
    for ranks in legs:
        for at in range(STEPS_PER_LEG):
            parts = [rank.seen[at] for rank in ranks if rank.tp_rank == 0]
            assert sorted(i for part in parts for i in part) == list(range(8 * step, 8 * step + 8))
            assert sorted(whole[0].seen[step]) == list(range(8 * step, 8 * step + 8))
            step += 1
        # Tensor-parallel peers read the same samples.
        first = [rank.seen for rank in ranks if rank.tp_rank == 0]
        assert all(rank.seen in first for rank in ranks)
