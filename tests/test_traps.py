"""Faults that give no error: each test here fails when its one-line fix is removed.

`make mutants` removes them. tests/mutants.py also lists the tests in other files.
"""

import re
from dataclasses import replace

import pytest
import torch

from tests.batches import concatenate
from tests.distributed import run_ranks
from tests.mutants import MUTANTS, ROOT
from tests.reference import update_error
from tests.runs import (
    SMALL,
    gather,
    join,
    open_small_run,
    small_batches,
    small_config,
    take_step,
    train_ranks,
)

BATCHES = small_batches(3)


def test_every_fix_that_a_mutant_removes_is_there():
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.fix) == 1, mutant.trap


def tensor_parallel_traps(rank: int):
    """Drift after steps with dropout, and a transposed gradient after its reduction."""
    from albert_ds.parallel.mesh import find_drift
    from albert_ds.parallel.tensor import apply_tensor_parallel

    config = small_config(
        world_size=2, tensor_parallel=2, model=replace(SMALL, dropout=0.3), micro_batch_size=4
    )
    run = open_small_run(config, BATCHES)
    for _ in BATCHES:
        take_step(run)
    drifted = find_drift(run.engine.deepspeed.module, run.mesh)
    x = torch.ones(3, 2, requires_grad=True)
    block = torch.nn.ModuleDict({"self_attention": torch.nn.Identity()})
    apply_tensor_parallel(block, run.mesh)
    # Its gradient is a transpose, which megatron-core's reduction gives back as it was.
    (block["self_attention"](x).t().contiguous() * (rank + 1.0)).sum().backward()
    return drifted, x.grad


@pytest.fixture(scope="module")
def tensor_parallel():
    return run_ranks(tensor_parallel_traps, 2)


def test_dropout_on_replicas_is_the_same_on_all_peers(tensor_parallel):
    assert [drifted for drifted, _ in tensor_parallel] == [[], []]


def test_a_gradient_that_is_not_contiguous_is_reduced(tensor_parallel):
    for _, gradient in tensor_parallel:
        assert torch.equal(gradient, torch.full((3, 2), 3.0)), gradient


CHECKPOINTED = (
    {"zero_optimization": {"stage": 0}},  # the baseline, nothing checkpointed
    {"zero_optimization": {"stage": 2}},
    {"zero_optimization": {"stage": 3}},
    # Buckets smaller than the block: here the reentrant form is wrong without an error.
    {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}},
)


def test_a_checkpointed_shared_block_is_reduced_once_and_whole():
    options = {"world_size": 2, "micro_batch_size": 4}
    configs = [
        small_config(ds_changes=changes, activation_checkpointing=which, **options)
        for changes, which in zip(CHECKPOINTED, ("none", *["block"] * 3), strict=True)
    ]
    plain, *others = run_ranks(train_ranks, 2, configs, BATCHES)[0]
    for changes, run in zip(CHECKPOINTED[1:], others, strict=True):
        assert update_error(run.weights, plain.weights, plain.initial) < 1e-5, changes


def start_of_training(rank: int):
    """Size of DeepSpeed's hidden step, moments before and after the first step, linked states."""
    import deepspeed

    from albert_ds.optim.adam import decay_groups
    from albert_ds.optim.lamb import Lamb

    join(1)
    model = torch.nn.Linear(8, 8)
    before = model.weight.detach().bfloat16().float()
    optimizer = Lamb(decay_groups(model.named_parameters(), 0.01), lr=0.01)
    optimizer.disarm()
    # The one wrapper that steps while it is built, which our own configuration check refuses.
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}},
        dist_init_required=False,
    )
    hidden_step = float((engine.optimizer.fp32_groups[0][0] - before).norm() / before.norm())

    run = open_small_run(small_config(world_size=2), BATCHES)
    fresh = gather(run.engine, "exp_avg.safetensors")
    take_step(run)
    linked = {
        name: deepspeed.utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        for name, parameter in run.engine.deepspeed.module.named_parameters()
    }
    return hidden_step, fresh, linked, gather(run.engine, "exp_avg.safetensors")


@pytest.fixture(scope="module")
def started():
    return run_ranks(start_of_training, 2)[0]


def test_building_the_engine_takes_no_hidden_optimizer_step(started):
    assert started[0] == 0


def test_every_parameter_group_has_its_state_from_the_start(started):
    _, fresh, linked, moments = started
    assert fresh and not any(moment.any() for moment in fresh.values())
    for name, moment in linked.items():
        assert torch.equal(moment, moments[name]), name


def kept_gradients(rank: int) -> list[str]:
    """What the passes of a step in bf16 leave beside the fp32 sums of the gradients."""
    from albert_ds.training.pretrain import next_batch, run_passes

    run = open_small_run(small_config(world_size=1, ds_file="zero1_bf16.json"), BATCHES)
    run_passes(run, next_batch(run))
    parameters = run.engine.deepspeed.module.named_parameters()
    return [name for name, parameter in parameters if parameter.grad is not None]


def test_no_bf16_gradient_is_kept_beside_its_fp32_sum():
    """DeepSpeed's default keeps two bytes a parameter from a step's first pass to its end."""
    assert run_ranks(kept_gradients, 1) == [[]]


def gradients(model, tensors) -> dict[str, torch.Tensor]:
    out = model(**tensors)
    (out["mlm_loss_sum"] / len(tensors["masked_labels"]) + out["pair_loss_sum"] / 8).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def measure_shared_sum(num_layers: int) -> tuple[float, float, float]:
    """Relative errors of a shared block's bf16 gradient: summed over its uses in bf16 as autograd
    does, summed in fp32, and the difference of the two. The reference is float64."""
    from albert_ds.model.albert import AlbertForPretraining

    config = replace(SMALL, num_layers=num_layers, hidden_size=128, ffn_size=512)
    tensors = concatenate(BATCHES[0]).tensors
    start = AlbertForPretraining(config, seed=0).bfloat16().state_dict()

    def shared_name(name: str) -> str:
        return re.sub(r"encoder\.(attention|ffn)\.\d+", r"encoder.\1.0", name)

    def build(sharing: str, dtype: torch.dtype):
        model = AlbertForPretraining(replace(config, sharing=sharing)).to(dtype)
        model.load_state_dict({n: start[shared_name(n)] for n in model.state_dict()})
        return model

    exact = gradients(build("all", torch.float64), tensors)
    in_half = gradients(build("all", torch.bfloat16), tensors)
    in_full: dict[str, torch.Tensor] = {}
    for name, gradient in gradients(build("none", torch.bfloat16), tensors).items():
        in_full[shared_name(name)] = in_full.get(shared_name(name), 0) + gradient
    block = [name for name in exact if "encoder" in name and "key.bias" not in name]

    def size(of) -> float:
        return float(torch.stack([of(name).norm() for name in block]).norm())

    whole = size(lambda n: exact[n])
    return (
        size(lambda n: in_half[n] - exact[n]) / whole,
        size(lambda n: in_full[n] - exact[n]) / whole,
        size(lambda n: in_half[n] - in_full[n]) / whole,
    )


@pytest.mark.parametrize("num_layers", [12, 24])
def test_summing_a_shared_gradient_in_bf16_loses_next_to_nothing(num_layers):
    in_half, in_full, difference = measure_shared_sum(num_layers)
    assert in_half < 1.06 * in_full  # an fp32 sum would not pay
    assert difference < in_full / 3
