"""The linear map in bf16 on a CPU against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from albert_ds.model.fused import LARGE, PIECE, has_onednn, linear

ROUNDING = 2**-8  # of bf16, and as much again for sums in fp32


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


@pytest.mark.skipif(not has_onednn("cpu", torch.bfloat16), reason="a CPU without AVX-512")
@pytest.mark.parametrize("rows", [0, 1, 100, 1229])
def test_values_and_gradients_are_rounded_once(rows):
    inputs = (draw(rows, 96), draw(50, 96), draw(50))
    gradient = torch.randn(rows, 50).bfloat16()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = F.linear(*exact)
    out = linear(*inputs)
    assert "OneDnnLinear" in type(out.grad_fn).__name__
    pairs = zip(
        [out, *torch.autograd.grad(out, inputs, gradient)],
        [expected, *torch.autograd.grad(expected, exact, gradient.double())],
        strict=True,
    )
    for result, true in pairs:
        torch.testing.assert_close(result.double(), true, rtol=ROUNDING, atol=1e-4)


class Summed(TorchDispatchMode):
    """The rows over which each product sums."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.rows.append(args[-1].size(0))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not has_onednn("cpu", torch.bfloat16), reason="a CPU without AVX-512")
def test_a_large_gradient_is_summed_by_pieces_and_is_as_near_to_float64():
    rows = 4 * PIECE + 100
    width = 768
    assert width * width >= LARGE
    x = draw(rows, width).detach()
    weight = draw(width, width)
    bias = draw(width)
    gradient = torch.randn(rows, width).bfloat16()
    result = linear(x, weight, bias)
    with Summed() as products:
        (dweight,) = torch.autograd.grad(result, weight, gradient)
    assert products.rows == [PIECE] * 4 + [100]
    exact = gradient.double().T @ x.double()
    off = [float((y.double() - exact).norm() / exact.norm()) for y in (dweight, exact.bfloat16())]
    assert off[0] < 2 * off[1]  # one rounding to bf16 is 0.0017


def test_frozen_tensors_get_no_gradient():
    x = draw(8, 16)
    weight = draw(4, 16)
    bias = draw(4)
    linear(x, weight.detach(), bias.detach()).sum().backward()
    assert x.grad is not None
    linear(x.detach(), weight.detach(), bias).sum().backward()
    assert weight.grad is None and bias.grad.tolist() == [8] * 4
