"""Products in eight bits without a GPU: what Triton's kernels do, by torch's operators on the host.

A product of eight bits is one of the same numbers in fp32. So a whole trainer runs, at any width.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from albert_ds.model import fp8, fused_block


def quantise(x: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True):
    """`fp8.quantise`, from the definition of its scale."""
    largest = x.detach().abs().max().double()
    room = torch.finfo(dtype).max / largest.clamp_min(1e-300)
    scale = room.log2().floor().clamp_max(126).exp2()
    scale = torch.where(largest.isfinite(), scale, torch.nan).float()
    eight = (x.detach().float() * scale).to(dtype)  # a power of two: nothing is rounded but here
    filled = F.pad(eight.view(torch.uint8), (0, 0, 0, -len(x) % 16)).view(dtype)
    turned = filled.view(torch.uint8).T.contiguous().view(dtype)
    return fp8.Eight(eight if rows else None, turned if columns else None, (1 / scale).reshape(1))


def widen(x: Tensor) -> Tensor:
    """Eight bits in bf16, which holds them all; by a table, five times as fast as torch's cast."""
    bits = x.view(torch.uint8)
    table = torch.arange(256, dtype=torch.uint8).view(x.dtype).bfloat16()
    return table.index_select(0, bits.int().flatten()).view(x.shape)


def multiply(a: Tensor, b: Tensor, a_scale, b_scale, *, bias, out_dtype, use_fast_accum) -> Tensor:
    """torch._scaled_mm, which takes a thousand times as long on a CPU; every sum is in fp32.

    The scales are powers of two, so they may come after the rounding to bf16.
    """
    assert a.is_contiguous() and b.T.is_contiguous()  # Hopper takes no other
    assert not any(size % 16 for size in b.shape)
    assert out_dtype == torch.bfloat16
    scale = a_scale * b_scale
    added = torch.zeros(b.size(1)) if bias is None else bias / scale
    return torch.addmm(added.bfloat16(), widen(a), widen(b.T).T) * scale.bfloat16()


def add_part(parts: Tensor, kind: int, total: Tensor, adds: bool) -> None:
    parts[kind, 0] = total + (parts[kind, 0] if adds else 0)


def join(q: Tensor, k: Tensor, v: Tensor, partial_sums) -> Tensor:
    joined = torch.cat([q, k, v], dim=1)
    parts, adds = partial_sums((1, 1, joined.size(1)), joined.device)
    add_part(parts, 0, joined.float().sum(0), adds)
    return joined


def run_gelu_backward(dy: Tensor, x: Tensor, partial_sums) -> Tensor:
    dx = torch.ops.aten.gelu_backward(dy.contiguous(), x, approximate="tanh")
    parts, adds = partial_sums((1, 1, x.size(1)), x.device)
    add_part(parts, 0, dx.float().sum(0), adds)
    return dx


def run_norm(ctx, x, added, weight, bias, eps: float, p: float, draws) -> list[Tensor]:
    assert p == 0
    total = x + added
    y, mean, rstd = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
    return [y, total, weight, mean, rstd]


def run_norm_backward(ctx, dy, parts, adds, total, weight, mean, rstd) -> tuple[Tensor, Tensor]:
    sizes = weight.shape
    shift = torch.zeros_like(weight)
    every = [True] * 3
    back = torch.ops.aten.native_layer_norm_backward
    dx, of_weight, of_bias = back(dy.contiguous(), total, sizes, mean, rstd, weight, shift, every)
    sums = of_weight, of_bias, dx.float().sum(0)
    for kind, gradient in enumerate(sums[: len(parts)]):
        add_part(parts, kind, gradient.float(), adds)
    return dx, dx


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return parts.sum(1).to(dtype)


KERNELS = (join, run_gelu_backward, run_norm, run_norm_backward, add_parts)


@contextmanager
def emulated():
    """Fused blocks run on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "quantise", quantise)
        patch.setattr(torch, "_scaled_mm", multiply)
        patch.setattr(fused_block, "count_programs", lambda device: 1)
        for kernel in KERNELS:
            patch.setattr(fused_block, kernel.__name__, kernel)
        yield
