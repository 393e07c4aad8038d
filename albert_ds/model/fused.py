"""What several operators of torch do, as one: on CUDA by the kernels of `model/kernels.py`.

Elsewhere, for few values, and on CUDA without Triton, torch's operators do the same, and their
results differ by rounding only. Dropout draws other random numbers there. On a CPU a product adds
its bias itself.
Shapes: N tokens, H hidden.
"""

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from albert_ds.model.device import can_use_triton
from albert_ds.model.draws import Draws
from albert_ds.model.dropout import drop

# Fewer values than these the device passes over faster than the host launches a kernel of Triton.
# On an H100 torch's operators are faster for base up to 32 sequences of 512 tokens, and slower
# from 48 on.
DEFAULT_MIN_TRITON_ELEMENTS: int = 1 << 24
MIN_TRITON_ELEMENTS: int = DEFAULT_MIN_TRITON_ELEMENTS
# A large weight's gradient on a CPU is summed over pieces of so many rows (docs/notebook/log.md).
PIECE = 512
LARGE = 1 << 19


def is_faster_in_triton(x: Tensor) -> bool:
    return can_use_triton(x) and x.numel() >= MIN_TRITON_ELEMENTS


def residual_norm(
    x: Tensor,
    added: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout: float,
    draws: Draws | None,
) -> Tensor:
    """LN(x + dropout(added)): [N, H] and [N, H] -> [N, H]."""
    if not is_faster_in_triton(x):
        return F.layer_norm(x + drop(added, dropout, draws), weight.shape, weight, bias, eps)
    from albert_ds.model import kernels  # imports Triton

    return kernels.ResidualNorm.apply(x, added, weight, bias, eps, dropout, draws)


def share_gradients(
    x: Tensor,
    groups: list[tuple[Tensor, ...]],
    alone: list[tuple[Tensor, ...]],
    *,
    eight_bits: bool,
) -> tuple[Tensor, Mapping]:
    """x before the layers, and by weight the sums of the gradients of each group.

    A group is a projection's weight and the vectors whose gradients are made beside its own. The
    functions below add to the sums, which reach the tensors through x. Groups that only one layer
    has, `alone`, have a sum for products in eight bits: weights are cast once for all layers.
    """
    from albert_ds.model import fp8, fused_block

    sums = {}
    for number, (weight, *vectors) in enumerate([*groups, *alone] if eight_bits else groups):
        eight = fp8.quantise(weight.detach(), fp8.E4M3) if eight_bits else None
        tensors = (weight, *vectors) if number < len(groups) else ()
        sums[weight] = fused_block.SharedGradients(*tensors, eight=eight)
    tensors = [tensor for group in groups for tensor in group]
    of_groups = [sums[group[0]] for group in groups]
    return fused_block.ReturnSharedGradients.apply(x, of_groups, *tensors), sums


def linear_heads(x: Tensor, weight: Tensor, bias: Tensor, sums: Mapping) -> tuple[Tensor, ...]:
    """Query, key and value of x by W [3H, H], and x for the residual: four of [N, H]."""
    from albert_ds.model import fused_block

    return fused_block.LinearHeads.apply(x, weight, bias, sums.get(weight))


def linear_gelu(x: Tensor, up: nn.Linear, sums: Mapping) -> tuple[Tensor, Tensor]:
    """gelu(up(x)) [N, F], and x [N, H] for the residual."""
    from albert_ds.model import fused_block

    return fused_block.LinearGelu.apply(x, up.weight, up.bias, sums.get(up.weight))


def linear_norm(
    x: Tensor,
    y: Tensor,
    last: nn.Linear,
    norm: nn.LayerNorm,
    dropout: float,
    draws: Draws | None,
    sums: Mapping,
) -> Tensor:
    """LN(x + dropout(last(y))) [N, H]; x is of `linear_heads` or `linear_gelu`."""
    from albert_ds.model import fused_block

    tensors = last.weight, norm.weight, norm.bias, last.bias
    rest = norm.eps, dropout, draws, sums.get(last.weight)
    return fused_block.LinearNorm.apply(x, y, *tensors, *rest)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b: x [N, in], W [out, in], b [out] -> [N, out]."""
    if is_faster_in_triton(x):
        from albert_ds.model import kernels

        return kernels.Linear.apply(x, weight, bias)
    form = OneDnnLinear.apply if has_onednn(x.device.type, x.dtype) else F.linear
    return form(x, weight, bias)


@functools.cache
def has_onednn(device: str, dtype: torch.dtype) -> bool:
    """Whether `OneDnnLinear` gains: in bf16 on a CPU with AVX-512.

    In fp32 it would too, but prepares a product for every new number of rows (`even_shapes.py`).
    """
    if (device, dtype) != ("cpu", torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class OneDnnLinear(torch.autograd.Function):
    """`linear` whose product adds the bias itself; torch's is copied to each row beforehand.

    By the operator that torch's compiler takes. On a Zen 4 both give the same bits.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        function = "none", [], ""  # of the sum
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, *function)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            dy @ weight if of_x else None,
            multiply_by_pieces(dy, x) if of_weight else None,
            dy.sum(0) if of_bias else None,
        )


def multiply_by_pieces(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x of bf16 on a CPU, [out, in]: dy [N, out], x [N, in].

    oneDNN is slow where it sums over many rows, most of all with AMX. A piece is added in its
    product, and the sum is rounded to bf16 once a piece.
    """
    is_large = dy.size(1) * x.size(1) >= LARGE and len(x) >= 2 * PIECE
    rows = PIECE if is_large else max(len(x), 1)
    (first, also), *others = zip(dy.split(rows), x.split(rows), strict=True)
    total = first.T @ also
    for piece, beside in others:
        total.addmm_(piece.T, beside)
    return total


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
