"""LAMB is exact however ZeRO and tensor parallelism cut the tensors.

The reference is one process in float64 that shares nothing with the product: Hugging Face's model
and LAMB written anew. The error is ||dp|| / ||p - p_init||, the worst tensor's.
"""

import pytest

from tests.batches import random_samples
from tests.distributed import run_ranks
from tests.reference import reference_training, update_error
from tests.training import SMALL, small_config, train_ranks

NUM_STEPS = 5
BATCHES = [
    random_samples(8, vocab_size=SMALL.vocab_size, max_length=32, seed=seed)
    for seed in range(NUM_STEPS)
]


STAGES = (1, 2, 3, 0)  # DeepSpeed reports the norm, but at ZeRO-0, where we do


@pytest.mark.parametrize(("tensor_parallel", "world_size"), [(1, 2), (2, 2), (2, 4)])
def test_update_equals_one_process_in_float64(tensor_parallel, world_size):
    configs = [
        small_config(
            world_size=world_size,
            tensor_parallel=tensor_parallel,
            ds_changes={"zero_optimization": {"stage": stage}, "gradient_clipping": 0.5},
        )
        for stage in STAGES
    ]
    runs = run_ranks(train_ranks, world_size, configs, BATCHES)[0]
    initial = runs[0].initial
    expected = reference_training(
        SMALL,
        initial,
        BATCHES,
        rates=[configs[0].rate_at(step) for step in range(NUM_STEPS)],
        clip=0.5,
    )
    for stage, run in zip(STAGES, runs, strict=True):
        assert run.losses == pytest.approx(expected.losses, rel=1e-6), f"ZeRO-{stage}"
        for step, (norm, wanted) in enumerate(zip(run.norms, expected.norms, strict=True), 1):
            assert norm == pytest.approx(wanted, rel=1e-6), (
                f"ZeRO-{stage}: gradient norm {norm:.6f} in step {step}, in float64 {wanted:.6f}"
            )
        error = update_error(run.weights, expected.weights, initial)
        assert error <= 1e-5, f"ZeRO-{stage}: update error {error:.1e}"
