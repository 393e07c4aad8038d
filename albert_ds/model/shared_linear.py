"""A linear layer as the several layers use it that share its weights (section 3.1's sharing).

Read once a forward pass. Then query, key and value can be one product, whose weight is concatenated
once for all layers; and the gradients of the uses can be added inside the products that form them,
in fp32 whatever the type. Autograd instead adds the gradients of two uses in the weights' own type,
with one more launch for each use.
"""

from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class SharedLinear:
    """x W^T + b, for any number of uses in one forward pass; `fuses_sums` says who adds gradients.

    Reads W [F, H] and b [F]; a use may want some of their rows only.
    """

    def __init__(self, weight: Tensor, bias: Tensor, *, fuses_sums: bool):
        self.sums = _Sums() if fuses_sums else None
        self.weight, self.bias = weight, bias
        if self.sums is not None:
            self.weight, self.bias = _Collect.apply(weight, bias, self.sums)

    def __call__(self, x: Tensor, rows: slice | None = None) -> Tensor:
        if self.sums is not None:
            return _use(x, self.weight, self.bias, self.sums, rows)
        if rows is None:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight[rows], self.bias[rows])


def sum_linears(linears: Mapping[str, nn.Linear]) -> dict[str, SharedLinear]:
    """These layers, with gradients summed inside the products."""
    return {n: SharedLinear(x.weight, x.bias, fuses_sums=True) for n, x in linears.items()}


def join_linears(linears: Collection[nn.Linear], *, fuses_sums: bool) -> SharedLinear:
    """Several layers of the same input as one; its outputs are theirs, one after the other."""
    weight, bias = (torch.cat([getattr(x, n) for x in linears]) for n in ("weight", "bias"))
    return SharedLinear(weight, bias, fuses_sums=fuses_sums)


class _Sums:
    """The gradients of the uses that the backward pass has reached; None before the first."""

    weight: Tensor | None = None
    bias: Tensor | None = None


class _Collect(torch.autograd.Function):
    """Passes W and b on; its backward comes after that of every use and returns the sums."""

    @staticmethod
    def forward(ctx, weight: Tensor, bias: Tensor, sums: _Sums) -> tuple[Tensor, Tensor]:
        ctx.sums, ctx.dtype = sums, weight.dtype
        ctx.set_materialize_grads(False)  # the uses send none
        return weight.view_as(weight), bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, *_) -> tuple[Tensor, Tensor, None]:
        weight, bias = ctx.sums.weight.to(ctx.dtype), ctx.sums.bias.to(ctx.dtype)
        ctx.sums.weight = ctx.sums.bias = None
        return weight, bias, None


class _Use(torch.autograd.Function):
    """x W^T + b, whose backward adds the gradients of W and b to `sums` and sends none."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor, sums: _Sums, rows: slice | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums, ctx.rows = sums, rows or slice(None)
        return F.linear(x, weight[ctx.rows], bias[ctx.rows])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x, weight), sums, rows = ctx.saved_tensors, ctx.sums, ctx.rows
        if sums.weight is None:
            exact = torch.promote_types(weight.dtype, torch.float32)
            sums.weight = torch.zeros_like(weight, dtype=exact)
            sums.bias = weight.new_zeros(len(weight), dtype=exact)
        add_product(sums.weight[rows], dy.T, x)
        sums.bias[rows].add_(dy.sum(0, dtype=sums.bias.dtype))  # += would copy the rows once more
        return dy @ weight[rows], None, None, None, None


# The compiler cannot follow what backward adds up; the products are library calls in any case.
_use = torch.compiler.disable(_Use.apply)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [F, H] += a [F, N] @ b [N, H]; a 16-bit product is added in fp32, without rounding."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # torch has no such product on a CPU
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
