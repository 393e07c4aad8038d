"""Muon in one process is torch's Muon. Under ZeRO and tensor parallelism: test_zero.py."""

import pytest
import torch

from albert_ds.optim.muon import assign
from tests.optim.muon import build_alone
from tests.reference import newton_schulz

SHAPES = [(24, 40), (40, 24), (32, 32)]
NUM_STEPS = 4


def train_both(scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """Weights after some steps of torch's Muon and of ours, and the worst error of an update."""
    generator = torch.Generator().manual_seed(0)
    drawn = [[scale * torch.randn(s, generator=generator) for s in SHAPES] for _ in range(5)]
    torch_weights, weights = ([torch.nn.Parameter(w.clone()) for w in drawn[0]] for _ in range(2))
    settings = dict(lr=0.02, momentum=0.95)
    published = torch.optim.Muon(
        torch_weights, **settings, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    optimizer = build_alone(weights, **settings)
    for gradients in drawn[1:]:
        for parameters in (torch_weights, weights):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
        published.step()
        optimizer.step()
    errors = [
        float((a - b).detach().norm() / (b.detach() - start).norm())
        for a, b, start in zip(weights, torch_weights, drawn[0], strict=True)
    ]
    return weights, torch_weights, max(errors)


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_it_is_torchs_muon(scale, monkeypatch):
    """torch iterates in bf16, which is all that differs: without it both agree to fp32."""
    *_, rounded = train_both(scale)
    assert rounded < 0.02
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    *_, exact = train_both(scale)
    assert exact < 2e-6


def test_every_matrix_has_one_worker_and_none_is_left_idle():
    block = [torch.Size(s) for s in [(8, 8)] * 4 + [(32, 8), (8, 32)]]
    assert assign(block, 1) == [0] * 6
    four = assign(block, 4)
    assert {four[4], four[5]}.isdisjoint(four[:4])  # a large one costs as much as four small ones
    assert set(four) == {0, 1, 2, 3}
    assert sorted(assign(block, 8)) == [0, 1, 2, 3, 4, 5]


SIZES = [
    (96, 384),
    (384, 96),
    pytest.param((4096, 16_384), marks=pytest.mark.nightly),  # ALBERT-xxlarge's: minutes
]


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_an_update_is_that_of_float64(shape):
    generator = torch.Generator().manual_seed(0)
    start, gradient = (0.02 * torch.randn(shape, generator=generator) for _ in range(2))
    matrix = torch.nn.Parameter(start.clone())
    matrix.grad = gradient
    build_alone([matrix], lr=1.0, momentum=0.95).step()
    # A first step's momentum has the direction of the gradient. The iteration leaves q as it is.
    q, r = torch.linalg.qr(gradient.double().T)
    moved = 0.1 * start + 0.2 * max(shape) ** 0.5 * newton_schulz(r.T) @ q.T
    assert (matrix.detach() - (start - moved)).norm() / moved.norm() < 4e-6
