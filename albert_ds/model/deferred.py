"""The gradient of a shared weight as one product over all its uses (section 3.1's sharing).

Autograd forms a shared weight's gradient use by use, so it is complete only after the backward pass
of the FIRST layer, and its reduction over ranks has nothing left to hide behind. Here the backward
pass of a use only passes dX on and holds its rows of x and dY; after the last use each weight in
turn gets dW = [dY_1 .. dY_L]^T [x_1 .. x_L], so that whoever listens for a finished gradient can
reduce one weight while the next one's product is formed. The sum over uses happens inside the
product, in fp32 whatever the type. The price is memory: x and dY of every use at once.
Shapes: N tokens, H and F widths in and out of a linear, L uses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from albert_ds.model.encoder import Encoder

Held = list[tuple[Tensor, Tensor]]  # (x, dY) of the uses that backward has passed


class DeferredLinear(nn.Linear):
    """An nn.Linear that is used several times between two calls of `begin`."""

    def begin(self) -> None:
        """Start a forward pass: its uses read the weight through a last node of backward."""
        self.held: Held = []
        self.read = _Collect.apply(self.weight, self.bias, self.held)

    def forward(self, input: Tensor) -> Tensor:
        return _Use.apply(input, *self.read, self.held)


class _Collect(torch.autograd.Function):
    """Passes weight and bias on; its backward, after that of every use, forms their gradients."""

    @staticmethod
    def forward(ctx, weight: Tensor, bias: Tensor, held: Held) -> tuple[Tensor, Tensor]:
        ctx.held = held
        ctx.set_materialize_grads(False)  # the uses send none
        return weight.view_as(weight), bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, *_) -> tuple[Tensor, Tensor, None]:
        x, dy = (torch.cat(parts) for parts in zip(*ctx.held, strict=True))  # [L N, H], [L N, F]
        ctx.held.clear()
        return dy.T @ x, dy.sum(0), None


class _Use(torch.autograd.Function):
    """x W^T + b, whose backward holds what W and b need instead of forming it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, held: Held) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.held = held
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.held.append((x, dy))
        return dy @ weight, None, None, None


def defer_weight_gradients(encoder: Encoder) -> None:
    """Defer the gradients of every linear of the encoder's blocks, in place.

    Not for weights that are cut (tensor parallelism) or gathered when used (ZeRO-3).
    """
    linears: list[DeferredLinear] = []
    for block in (*encoder.attention, *encoder.ffn):
        for module in block.modules():
            if type(module) is nn.Linear:
                module.__class__ = DeferredLinear
            if isinstance(module, DeferredLinear):
                linears.append(module)

    def begin(*_) -> None:
        for linear in linears:
            linear.begin()

    encoder.register_forward_pre_hook(begin)
