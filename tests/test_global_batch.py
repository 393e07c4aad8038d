"""The update does not depend on how the batch is cut into ranks and micro-batches.

The samples differ in length, in the number of masked tokens and in having a pair label, so a mean
over ranks of means would give another loss.
"""

import pytest

from tests.distributed import run_ranks
from tests.reference import update_error
from tests.runs import small_batches, small_config, train_ranks

BATCHES = small_batches(4)


def test_any_cut_gives_the_same_update():
    # The micro-batches of a step differ in the number of labelled pairs.
    labelled = [[s["pair_label"] >= 0 for s in samples] for samples in BATCHES]
    assert any(sum(row[:4]) != sum(row[4:]) for row in labelled)
    alone = [small_config(world_size=1, micro_batch_size=size) for size in (8, 4, 1)]
    pairs = [small_config(world_size=2, micro_batch_size=size) for size in (4, 1)]
    runs = (
        run_ranks(train_ranks, 1, alone, BATCHES)[0] + run_ranks(train_ranks, 2, pairs, BATCHES)[0]
    )
    whole = runs[0]
    for run in runs[1:]:
        assert run.losses == pytest.approx(whole.losses, rel=1e-6)
        assert run.norms == pytest.approx(whole.norms, rel=1e-6)
        assert update_error(run.weights, whole.weights, whole.initial) <= 1e-5
