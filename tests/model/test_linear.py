"""The linear map in bf16 on a CPU against float64."""

import pytest
import torch
import torch.nn.functional as F

from albert_ds.model.fused import has_onednn, linear

ROUNDING = 2**-8  # of bf16, and as much again for sums in fp32


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


@pytest.mark.skipif(not has_onednn("cpu", torch.bfloat16), reason="a CPU without AVX-512")
@pytest.mark.parametrize("rows", [0, 1, 100, 1229])
def test_values_and_gradients_are_rounded_once(rows):
    inputs, gradient = (draw(rows, 96), draw(50, 96), draw(50)), torch.randn(rows, 50).bfloat16()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, found = F.linear(*exact), linear(*inputs)
    assert "OneDnnLinear" in type(found.grad_fn).__name__
    pairs = zip(
        [found, *torch.autograd.grad(found, inputs, gradient)],
        [expected, *torch.autograd.grad(expected, exact, gradient.double())],
        strict=True,
    )
    for result, true in pairs:
        torch.testing.assert_close(result.double(), true, rtol=ROUNDING, atol=1e-4)


def test_frozen_tensors_get_no_gradient():
    x, weight, bias = draw(8, 16), draw(4, 16), draw(4)
    linear(x, weight.detach(), bias.detach()).sum().backward()
    assert x.grad is not None
    linear(x.detach(), weight.detach(), bias).sum().backward()
    assert weight.grad is None and bias.grad.tolist() == [8] * 4
