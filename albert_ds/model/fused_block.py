"""A block of the encoder as three products, each with what follows it: on CUDA, by `kernels.py`.

    q, k, v = x W^T + b  ->  attention  ->  LN(x + dropout(y W^T + b))
    gelu(x W^T + b)                     ->  LN(x + dropout(y W^T + b))

The first of two also returns x, for the residual of the second alone. So the gradient of the
residual arrives where the product for x's other gradient is made, which adds it: in place, as it is
fresh memory of `LinearNorm`. Gradients of a block that layers share are summed where they are made,
too (`SharedGradients`).
Shapes: N tokens, H hidden, F feed-forward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from albert_ds.model import fp8
from albert_ds.model.kernels import (
    add_parts,
    count_programs,
    join,
    run_gelu_backward,
    run_norm,
    run_norm_backward,
)


class SharedGradients:
    """The gradients of a weight and of vectors beside it, summed over the layers that share them.

    Each layer adds its own: to the weight's in the product, to the vectors' in fp32 parts of sums.
    With `eight`, the weight in eight bits, the products are in eight bits (`fp8.py`).
    """

    def __init__(self, *tensors: Tensor, eight: fp8.Eight | None = None):
        self.tensors = tensors  # whose gradients they are: the weight, then the vectors
        self._eight = eight
        self._weight: Tensor | None = None
        self._parts: Tensor | None = None  # fp32 [K, programs, H]

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, list[Tensor]]:
        """x W^T + b, and the two tensors that `go_back` needs of it: [N, in] -> [N, out]."""
        if self._eight is not None:
            return fp8.multiply(x, self._eight, bias)
        return torch.addmm(bias, x, weight.T), [x, weight]

    def partial_sums(
        self, shape: tuple[int, int, int], device: torch.device
    ) -> tuple[Tensor, bool]:
        """Room for the parts of a layer's sums, and whether to add to what is there."""
        adds = self._parts is not None
        if self._parts is None:
            self._parts = torch.empty(shape, device=device, dtype=torch.float32)
        return self._parts, adds

    def go_back(self, dy: Tensor, kept: list[Tensor], dx: Tensor | None = None) -> tuple:
        """The gradients of a layer from dy [N, out] and what `multiply` kept.

        First x's, added to dx if given; then the weight's and the vectors', None each if other
        layers add to them, for `ReturnSharedGradients`.
        """
        assert self._parts is not None
        if self._eight is not None:
            of_x, of_weight = fp8.go_back(dy, self._eight, kept)
            dx = of_x if dx is None else dx.add_(of_x)
            self._weight = of_weight if self._weight is None else self._weight.add_(of_weight)
        else:
            x, weight = kept
            dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            self._weight = dy.T @ x if self._weight is None else self._weight.addmm_(dy.T, x)
        return dx, *([None] * (1 + len(self._parts)) if self.tensors else self.take())

    def take(self) -> list[Tensor | None]:
        """The gradients, once; None each if no layer has added any."""
        weight = self._weight
        parts = self._parts
        if weight is None or parts is None:
            return [None] * len(self.tensors)
        self._weight = self._parts = None  # a gradient that two hold would be copied
        return [weight, *add_parts(parts, weight.dtype)]


class ReturnSharedGradients(torch.autograd.Function):
    """x before the first layer; backwards also the sums, complete as the gradient of x is."""

    @staticmethod
    def forward(ctx, x: Tensor, sums: list[SharedGradients], *tensors: Tensor) -> Tensor:
        ctx.sums = sums
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor):
        return dx, None, *(gradient for each in ctx.sums for gradient in each.take())


class LinearHeads(torch.autograd.Function):
    """q, k, v = x W^T + b, and x: x [N, H], W [3H, H], b [3H] -> four of [N, H]."""

    @staticmethod
    def forward(ctx, x, weight, bias, shared: SharedGradients | None) -> tuple[Tensor, ...]:
        ctx.sums = shared or SharedGradients()
        y, kept = ctx.sums.multiply(x, weight, bias)
        ctx.save_for_backward(*kept)
        return *y.chunk(3, dim=1), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor, dx: Tensor):
        dy = join(dq, dk, dv, ctx.sums.partial_sums)
        return *ctx.sums.go_back(dy, ctx.saved_tensors, dx), None


class LinearGelu(torch.autograd.Function):
    """gelu(x W^T + b), and x: x [N, H], W [F, H], b [F] -> [N, F], [N, H]."""

    @staticmethod
    def forward(ctx, x, weight, bias, shared: SharedGradients | None) -> tuple[Tensor, Tensor]:
        ctx.sums = shared or SharedGradients()
        inner, kept = ctx.sums.multiply(x, weight, bias)
        ctx.save_for_backward(*kept, inner)
        return F.gelu(inner, approximate="tanh"), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, dx: Tensor):
        *kept, inner = ctx.saved_tensors
        dinner = run_gelu_backward(dy, inner, ctx.sums.partial_sums)
        return *ctx.sums.go_back(dinner, kept, dx), None


class LinearNorm(torch.autograd.Function):
    """LN(x + dropout(y W^T + b)): x [N, H], y [N, in], W [H, in], gain, shift, b [H] -> [N, H]."""

    @staticmethod
    def forward(ctx, x, y, weight, gain, shift, bias, eps: float, p: float, draws, shared):
        ctx.sums = shared or SharedGradients()
        added, kept = ctx.sums.multiply(y, weight, bias)
        out, *of_norm = run_norm(ctx, x, added, gain, shift, eps, p, draws)
        ctx.save_for_backward(*kept, *of_norm)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        *kept, total, gain, mean, rstd = ctx.saved_tensors
        shape = 3, count_programs(dout.device), dout.size(1)
        parts, adds = ctx.sums.partial_sums(shape, dout.device)
        dx, dadded = run_norm_backward(ctx, dout, parts, adds, total, gain, mean, rstd)
        return dx, *ctx.sums.go_back(dadded, kept), None, None, None, None
