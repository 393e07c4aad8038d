"""LAMB and Muon are exact under ZeRO and tensor parallelism; 16-bit runs start from fp32 masters.

The reference is one process in float64 that shares no code with the product: Hugging Face's model,
LAMB and Muon written again. The error is ||dp|| / ||p - p_init|| of the worst tensor.
"""

import pytest
import torch

from albert_ds.model.albert import AlbertForPretraining
from tests.distributed import run_ranks
from tests.optim import muon
from tests.reference import reference_training, update_error
from tests.runs import SMALL, gather, join, small_batches, small_config, train_ranks

NUM_STEPS = 5
BATCHES = small_batches(NUM_STEPS)


STAGES = (1, 2, 3, 0)  # the trainer computes the norm at ZeRO-0, DeepSpeed at the others


@pytest.mark.parametrize("optimizer", [{}, muon.DS_CHANGES], ids=["lamb", "muon"])
@pytest.mark.parametrize(("tensor_parallel", "world_size"), [(1, 2), (2, 2), (2, 4)])
def test_update_equals_one_process_in_float64(tensor_parallel, world_size, optimizer):
    options = dict(world_size=world_size, tensor_parallel=tensor_parallel)
    options["ds_changes"] = {"gradient_clipping": 0.5, **optimizer}
    configs = [small_config(stage=stage, **options) for stage in STAGES]
    runs = run_ranks(train_ranks, world_size, configs, BATCHES)[0]
    initial = runs[0].initial
    expected = reference_training(
        SMALL,
        initial,
        BATCHES,
        rates=[configs[0].rate_at(step) for step in range(NUM_STEPS)],
        clip=0.5,
        muon=bool(optimizer),
    )
    for stage, run in zip(STAGES, runs, strict=True):
        assert run.losses == pytest.approx(expected.losses, rel=1e-6), f"ZeRO-{stage}"
        for step, (norm, wanted) in enumerate(zip(run.norms, expected.norms, strict=True), 1):
            assert norm == pytest.approx(wanted, rel=1e-6), (
                f"ZeRO-{stage}: gradient norm {norm:.6f} in step {step}, in float64 {wanted:.6f}"
            )
        error = update_error(run.weights, expected.weights, initial)
        assert error <= 1e-5, f"ZeRO-{stage}: update error {error:.1e}"


HALF = [f"zero{stage}_{kind}.json" for kind in ("bf16", "fp16") for stage in (1, 2, 3)]


def build_half(rank: int, configs: list, weights: dict) -> list[tuple]:
    """For each config: the masters from the seed, those from `weights`, and the rounding error.

    The last is the largest difference between a 16-bit weight and its rounded master.
    """
    from deepspeed.accelerator import get_accelerator

    from albert_ds.training.pretrain import build

    get_accelerator().is_fp16_supported = lambda: True  # any CPU can hold fp16 weights
    device, mesh = join(configs[0].tensor_parallel)
    rows = []
    for config in configs:
        seeded = gather(build(config, mesh, device), "weights.safetensors")
        engine = build(config, mesh, device, {n: w.clone() for n, w in weights.items()})
        differences = [0.0]
        parameters = dict(engine.deepspeed.module.named_parameters())
        for fragment in engine.fragments:
            if not fragment.numel:
                continue
            parameter = parameters[fragment.name]
            begin = fragment.offset
            if engine.stage == 3:  # this rank's partition
                parameter = parameter.ds_tensor
                begin = 0
            half = parameter.detach().reshape(-1)[begin : begin + fragment.numel]
            master = fragment.flat.detach().view(-1)[fragment.in_flat]
            assert half.dtype != torch.float32 and master.dtype == torch.float32
            differences.append(float((half - master.to(half.dtype)).abs().max()))
        rows.append((seeded, gather(engine), max(differences)))
    return rows


@pytest.mark.parametrize(("tensor_parallel", "world_size"), [(1, 1), (1, 2), (2, 2)])
def test_16_bit_runs_start_from_the_fp32_weights(tensor_parallel, world_size):
    configs = [
        small_config(world_size=world_size, tensor_parallel=tensor_parallel, ds_file=file)
        for file in HALF
    ]
    initial = AlbertForPretraining(SMALL, seed=configs[0].seed).state_dict()
    other = AlbertForPretraining(SMALL, seed=1).state_dict()  # as --init-from passes them
    assert any(not torch.equal(w.bfloat16().float(), w) for w in initial.values())
    runs = run_ranks(build_half, world_size, configs, other)
    for file, (seeded, given, _) in zip(HALF, runs[0], strict=True):
        for name, weight in initial.items():
            assert torch.equal(seeded[name], weight), (file, name)
        for name, weight in other.items():
            assert torch.equal(given[name], weight), (file, name)
    assert all(rounding == 0 for run in runs for _, _, rounding in run)
