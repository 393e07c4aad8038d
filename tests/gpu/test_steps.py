"""Whole steps on a CUDA device: determinism, fp16's loss scale, LAMB, flash.

Each run is a process of its own. tests/fake_cuda runs these on its device too, but for what needs
triton.
"""

import json
from dataclasses import replace

import pytest
import torch

from albert_ds.model.attention import VarlenAttention
from albert_ds.model.device import has_triton
from albert_ds.model.draws import Draws
from albert_ds.model.fused import MIN_TRITON_ELEMENTS, residual_norm
from tests.batches import random_samples
from tests.distributed import run_ranks
from tests.finetuning import write_squad
from tests.legs import tune
from tests.models import run_export
from tests.runs import SMALL, Trained, small_config, train_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WIDE = replace(SMALL, num_heads=2)  # 16-bit attention takes heads whose width 8 divides
BATCHES = [random_samples(8, vocab_size=101, max_length=24, seed=seed) for seed in range(3)]


def train(rank: int, configs: list, deterministic: bool = False) -> list[Trained]:
    from albert_ds.process.rendezvous import use_deterministic_algorithms

    if deterministic:
        use_deterministic_algorithms()
    return train_ranks(rank, configs, BATCHES)


def config_of(precision: str, **settings):
    dropout = settings.pop("dropout", 0.0)
    model = replace(WIDE, dropout=dropout)
    return small_config(world_size=1, ds_file=f"zero1_{precision}.json", model=model, **settings)


def distance(one: Trained, other: Trained) -> float:
    """||difference|| / ||update||, over all tensors together."""
    off = [(w - other.weights[name]).norm() for name, w in one.weights.items()]
    way = [(w - other.initial[name]).norm() for name, w in other.weights.items()]
    return float(torch.stack(off).norm() / torch.stack(way).norm())


def test_deterministic_steps_with_dropout_repeat_bit_for_bit():
    config = config_of("bf16", dropout=0.1)
    ((one,), (other,)) = (run_ranks(train, 1, [config], True)[0] for _ in range(2))
    assert one.losses == other.losses and one.norms == other.norms
    assert all(torch.equal(w, other.weights[name]) for name, w in one.weights.items())


def test_fp16_halves_its_scale_where_it_overflows_and_then_learns():
    high = config_of("fp16", ds_changes={"fp16": {"initial_scale_power": 32, "hysteresis": 1}})
    low = config_of("fp16", ds_changes={"fp16": {"initial_scale_power": 8}})
    skipped, applied = run_ranks(train, 1, [high, low])[0]
    assert all(torch.equal(w, skipped.initial[name]) for name, w in skipped.weights.items())
    assert not any(map(torch.isfinite, torch.tensor(skipped.norms)))
    (exact,) = run_ranks(train, 1, [config_of("fp32")])[0]
    assert distance(applied, exact) < 0.05


def test_half_precision_is_fp32_with_rounding():
    exact, rounded = run_ranks(train, 1, [config_of("fp32"), config_of("bf16")])[0]
    assert 0 < distance(rounded, exact) < 0.15
    assert rounded.losses == pytest.approx(exact.losses, rel=1e-2)


@pytest.mark.parametrize("kind", ["LAMB", "Muon"])
def test_an_optimizer_takes_the_step_that_it_takes_on_a_cpu(kind):
    from tools.lab.lamb_bench import build_optimizers

    steps = []
    for device in ("cpu", "cuda"):
        optimizer = build_optimizers("albert-tiny", torch.device(device))[kind]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.detach().cpu().clone() for p in parameters]
        for seed, p in enumerate(parameters):
            p.grad.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        optimizer.step()
        pairs = zip(parameters, before, strict=True)
        steps.append(torch.cat([p.detach().cpu() - start for p, start in pairs]))
    assert (steps[1] - steps[0]).norm() <= {"LAMB": 1e-6, "Muon": 1e-5}[kind] * steps[0].norm()


@pytest.mark.skipif(not has_triton(), reason="no Triton for this device")
def test_kernels_of_triton_run_for_many_values_only():
    from torch.profiler import ProfilerActivity, profile

    def names(tokens: int) -> str:
        x = torch.ones(tokens, 1024, device="cuda")
        weight = torch.ones(1024, device="cuda")
        draws = Draws.anew(torch.tensor([0, tokens], device="cuda"), tokens)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            residual_norm(x, x, weight, weight, 1e-12, 0.1, draws)
            torch.cuda.synchronize()
        return " ".join(event.name for event in trace.events())

    assert "_norm_forward" in names(MIN_TRITON_ELEMENTS // 1024)
    assert "_norm_forward" not in names(MIN_TRITON_ELEMENTS // 1024 - 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fine_tuning_learns(checkpoint, cola, tmp_path, precision):
    out = tmp_path / "out"
    steps = {"steps": 120, "eval_every": 20, "learning_rate": 0.005}
    ds = f"ds_configs/zero1_{precision}_adamw.json"
    tune("glue/cola", cola, checkpoint, out, deepspeed_config=ds, **steps)
    assert json.loads((out / "results.json").read_text())["dev"]["matthews"] > 0.8


def test_a_fine_tuned_model_answers_in_hugging_face_on_the_device(checkpoint, tmp_path):
    from transformers import AutoModelForQuestionAnswering

    out = tmp_path / "out"
    data = write_squad(tmp_path / "squad", "v1.1")
    tune("squad1", data, checkpoint, out, sequence_length=32)
    folder = run_export(out, tmp_path / "exported")
    ids = torch.randint(5, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    answers = []
    for device in ("cpu", "cuda"):
        peer = AutoModelForQuestionAnswering.from_pretrained(folder).to(device).eval()
        with torch.no_grad():
            answers.append(peer(input_ids=ids.to(device)).start_logits.cpu())
    torch.testing.assert_close(*answers, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_drops_the_same_in_backward_where_few_queries_read(dtype):
    """As the last layer calls it: fewer queries than keys, in each sequence another number."""
    lengths, reads = torch.tensor([40, 7, 64]), torch.tensor([6, 1, 9])
    k_ends, q_ends = (
        torch.cat([torch.zeros(1, dtype=torch.int64), x.cumsum(0)]).to("cuda", torch.int32)
        for x in (lengths, reads)
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(int(n), 2, 64, generator=generator).to("cuda", dtype).requires_grad_()
        for n in (reads.sum(), lengths.sum(), lengths.sum())
    )
    core = VarlenAttention(dropout=0.25)
    out = core(q, k, v, q_ends, k_ends, int(lengths.max()))
    (gradient,) = torch.autograd.grad(out, v, out.detach())
    # The output is linear in v, so <gradient of v, v> = <output, gradient of the output> where
    # backward drops the same probabilities.
    linear = (gradient.float() * v.float()).sum()
    square = out.float().square().sum()
    assert linear.item() == pytest.approx(square.item(), rel=2e-2)
    kept = core.eval()(q, k, v, q_ends, k_ends, int(lengths.max()))
    assert not torch.equal(kept, out)
