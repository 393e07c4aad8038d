"""Matrices in eight bits: the kernels that make them, in Triton's interpreter without a GPU.

And models whose products are in eight bits, by torch's operators on the host (`eight_bits.py`).
"""

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from albert_ds.base.errors import UserError
from albert_ds.engine import deepspeed_config
from albert_ds.model import fp8, fused_block
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import SIZES
from tests import eight_bits
from tests.model.conftest import INPUTS, build_batch, build_config
from tests.runs import DS_CONFIGS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = pytest.mark.parametrize("kind", fp8.TOP)


def draw_exact(rows: int, width: int, kind: torch.dtype) -> torch.Tensor:
    """Numbers that the type holds as they are, in bf16: Triton's interpreter rounds otherwise."""
    numbers = torch.arange(256, dtype=torch.uint8).view(kind).float()
    numbers = numbers[numbers.isfinite()]
    drawn = torch.randint(len(numbers), (rows, width), generator=torch.Generator().manual_seed(1))
    drawn[-1, -1] = numbers.argmax()
    return numbers[drawn].to(DEVICE, torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@KINDS
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (37, 80), (130, 144)])
@pytest.mark.parametrize("power", [0, -70, 40])
def test_a_matrix_and_its_transpose_with_the_largest_scale_that_fits(kind, rows, width, power):
    x = draw_exact(rows, width, kind)
    eight = fp8.quantise(x * 2.0**power, kind)
    assert eight.scale.item() == 2.0**power
    assert same_bits(eight.rows, x.to(kind))
    assert eight.columns.shape == (width, -(-rows // 16) * 16)
    assert same_bits(eight.columns[:, :rows].T, x.to(kind))
    assert not eight.columns[:, rows:].float().any()
    assert fp8.quantise(x, kind, columns=False).columns is None


@KINDS
def test_the_largest_value_is_in_the_upper_half_of_the_range_and_never_cut_off(kind):
    limit = torch.finfo(kind).max
    for largest in torch.tensor([1.0, 1.75, 1.7578125, 1.9921875, 3e38, 1e-37, 2.0**-133]):
        x = torch.zeros(16, 16, device=DEVICE, dtype=torch.bfloat16)
        x[5, 3] = -largest
        eight = fp8.quantise(x, kind)
        scaled = x.double() / eight.scale
        low = limit / 2 if largest > 1e-35 else 0  # the scale itself is a normal number
        assert low < -scaled.min() <= limit


@KINDS
def test_zeros_stay_and_what_is_not_finite_makes_the_product_nan(kind):
    x = torch.zeros(16, 16, device=DEVICE, dtype=torch.bfloat16)
    eight = fp8.quantise(x, kind)
    assert eight.scale.isfinite().all() and not eight.rows.float().any()
    for value in (float("inf"), float("-inf"), float("nan")):
        x[2, 7] = value
        assert fp8.quantise(x, kind).scale.isnan().all()


def draw(*shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return drawn.to(DEVICE, torch.bfloat16).requires_grad_()


def read(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """What is left of x [N, K] in eight bits, in float64."""
    eight = eight_bits.quantise(x, kind)
    return eight.rows.double() * eight.scale


@pytest.mark.parametrize("kernels", ["Triton's", "the host's"])
def test_the_three_products_are_of_the_numbers_in_eight_bits(kernels):
    """Of rows that 16 does not divide; Triton's interpreter rounds to eight bits otherwise."""
    x = draw(37, 48)
    weight = draw(80, 48)
    bias = draw(80)
    dy, dx = (draw(37, width).detach() for width in (80, 48))
    with eight_bits.emulated() if kernels == "the host's" else nullcontext():
        sums = fused_block.SharedGradients(eight=fp8.quantise(weight.detach(), fp8.E4M3))
        y, again = fused_block.LinearGelu.apply(x, weight, bias, sums)
        gradients = torch.autograd.grad((y, again), (x, weight), (dy, dx.clone()))
    x8, w8 = read(x, fp8.E4M3), read(weight, fp8.E4M3)
    inner = (F.linear(x8, w8) + bias.double()).detach().requires_grad_()
    expected = F.gelu(inner, approximate="tanh")
    (dinner,) = torch.autograd.grad(expected, inner, dy.double())
    dinner = read(dinner.bfloat16(), fp8.E5M2)
    limit = 0.25 if kernels == "Triton's" and DEVICE == "cpu" else 0.01
    for one, other in zip(
        [y, *gradients], [expected, dinner @ w8 + dx, dinner.T @ x8], strict=True
    ):
        assert (one - other).norm() < limit * other.norm()


def take_gradients(model, batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(**batch)
    (out["mlm_loss_sum"] + out["pair_loss_sum"] + out["exit_loss_sum"]).backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if "key.bias" not in n}


def build(sharing="all", checkpointing="none", **changes) -> AlbertForPretraining:
    sizes = {"hidden_size": 64, "ffn_size": 256, **changes}
    config = build_config(sharing=sharing, initializer_range=0.1, **sizes)
    options = {"activation_checkpointing": checkpointing, "exits": {2: 0.5}}
    model = AlbertForPretraining(config, seed=3, **options)
    model.albert.encoder.eight_bits = True
    return model


@pytest.mark.parametrize(
    # Three of four layers, the last has output rows alone: x and dy of four projections each, and x
    # again where the backward pass computes it again.
    ("sharing", "checkpointing", "weights", "others"),
    [
        ("all", "none", 4, 3 * 8),
        ("attention", "block", 10, 3 * 12),
        ("cycle:2", "attention", 8, 3 * 10),
        ("none", "none", 16, 3 * 8),
    ],
)
def test_gradients_of_a_model_and_one_cast_of_each_weight(
    sharing, checkpointing, weights, others, monkeypatch
):
    """Gradients are off float64's by what eight bits round; a weight is cast once for all."""
    batch = build_batch([9, 30, 17, 1, 35])
    cast = []
    model = build(sharing, checkpointing)
    exact, half = (copy.deepcopy(model).to(kind) for kind in (torch.float64, torch.bfloat16))
    exact.albert.encoder.eight_bits = half.albert.encoder.eight_bits = False

    def count(x, kind, **options):
        cast.append(len(x) in (64, 192, 256))  # a weight's rows, not a micro-batch's
        return eight_bits.quantise(x, kind, **options)

    with eight_bits.emulated():
        monkeypatch.setattr(fp8, "quantise", count)
        gradients = take_gradients(model.bfloat16(), batch)
        assert (sum(cast), cast.count(False)) == (weights, others)
    expected, usual = take_gradients(exact, batch), take_gradients(half, batch)
    for name, gradient in expected.items():
        off, of_half = (
            float((g[name] - gradient).norm() / gradient.norm()) for g in (gradients, usual)
        )
        assert off < 0.25 and (off > 2 * of_half or "encoder" not in name), (name, off, of_half)
    pairs = zip(states(model, batch), states(exact, batch), strict=True)
    for layer, (one, other) in enumerate(pairs):  # 0: the embedding's
        off = float((one - other).norm() / other.norm())
        assert 0.02 * min(layer, 1) < off < 0.01 + 0.025 * layer, (layer, off)


def states(model, batch) -> list[torch.Tensor]:
    """The states of all tokens between the layers, in training."""
    inputs = {name: batch[name] for name in INPUTS}
    with eight_bits.emulated(), torch.no_grad():
        return [x.double() for x in model.albert(**inputs)["hidden_states"]]


CHANGES = {
    "an update": lambda model, other: [p.mul_(1.5) for p in model.parameters()],
    "a load": lambda model, other: model.load_state_dict(other.state_dict()),
    "another depth": lambda model, other: model.albert.encoder.set_depth(3),
    "averaged weights": lambda model, other: [
        p.copy_(q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_in_eight_bits_are_those_of_now(change):
    """After each change the gradients are those of a model that never ran before."""
    batch = build_batch([9, 30, 17])
    model = build().bfloat16()
    other = AlbertForPretraining(model.config, seed=7).bfloat16()
    with eight_bits.emulated():
        before = take_gradients(model, batch)
        with torch.no_grad():
            CHANGES[change](model, other)
        new = build().bfloat16()
        new.load_state_dict(model.state_dict())
        new.albert.encoder.set_depth(len(model.albert.encoder.plan))
        gradients, expected = take_gradients(model, batch), take_gradients(new, batch)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert not all(torch.equal(gradients[name], before[name]) for name in before)


def test_evaluation_is_in_bf16():
    batch = build_batch([9, 30, 17])
    model = build().bfloat16().eval()
    with eight_bits.emulated(), torch.no_grad():
        outputs = model(**batch)
    model.albert.encoder.eight_bits = False
    with torch.no_grad():
        assert all(torch.equal(x, outputs[name]) for name, x in model(**batch).items())


XLARGE = SIZES["albert-xlarge"]
REFUSED = [
    (SIZES["albert-large"], {}, "--hidden-size 1024: .*; allowed: multiples of 16 from 2048 on"),
    (replace(XLARGE, hidden_size=2056, num_heads=8), {}, "--hidden-size 2056: "),
    (replace(XLARGE, ffn_size=8200), {}, "--ffn-size 8200: "),
    (replace(XLARGE, per_layer="scale"), {}, "--per-layer scale: .*; allowed: none"),
    (XLARGE, {"tensor_parallel": 2}, "--tensor-parallel 2: .*; allowed: 1"),
    (XLARGE, {"capability": None}, "this device: .*; allowed: an H100"),
    (XLARGE, {"capability": (8, 0)}, "this device: "),
    (XLARGE, {"triton": False}, "no Triton"),
    (XLARGE, {}, None),
    (SIZES["albert-xxlarge"], {"capability": (10, 0)}, None),
]


@pytest.mark.parametrize(("model", "room", "words"), REFUSED)
def test_what_cannot_run_in_fp8_is_refused_in_one_line(model, room, words, monkeypatch):
    room = {"tensor_parallel": 1, "capability": (9, 0), "triton": True, **room}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: room["capability"] is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: room["capability"])
    monkeypatch.setattr(deepspeed_config, "find_spec", lambda name: room["triton"] or None)

    def check(enabled: bool) -> None:
        config = {"bf16": {"enabled": True}, "fp8": {"enabled": enabled}}
        layout = {"tensor_parallel": room["tensor_parallel"]}
        deepspeed_config.check_eight_bits(Path("ds.json"), config, model, **layout)

    check(False)
    if words is None:
        check(True)
        return
    with pytest.raises(UserError, match=f"ds.json: fp8.enabled true is refused with {words}") as e:
        check(True)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_fp8_is_refused_beside_other_precisions(precision, tmp_path):
    shipped = json.loads((DS_CONFIGS / f"zero1_{precision}.json").read_text())
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**shipped, "fp8": {"enabled": True}}))
    with pytest.raises(UserError, match=f"fp8 with {precision} is refused: .*; allowed: bf16"):
        deepspeed_config.read_ds_config(path)
