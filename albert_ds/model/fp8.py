"""Matrices in eight bits, for the products of an encoder's block on Hopper GPUs.

Values and weights become e4m3, gradients e5m2, each matrix with one scale of its own: the largest
power of two by which its largest value, found at that moment, still fits. So scaling rounds
nothing, no value is cut off, and a matrix that is not finite makes its products NaN. The scale
stays on the device.

Hopper multiplies by rows of both operands: x W^T takes the rows of x and of W, dy W the columns of
W, dy^T x those of dy and of x. Columns are kept as rows of the transposed matrix, and zeros fill
these up to a multiple of 16, which the product asks for.
Shapes: N rows, K columns, N16 N rounded up to a multiple of 16.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from albert_ds.model.kernels import count_programs

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# The largest number of each type is 1.75 x 2^this.
TOP = {E4M3: 8, E5M2: 15}
VALUES = 8192  # that a program reads at once
TILE = {"ROWS": 128, "COLUMNS": 128, "num_warps": 8}


class Eight(NamedTuple):
    """A matrix [N, K] in eight bits; what no product needs of it is None."""

    rows: Tensor | None  # [N, K]
    columns: Tensor | None  # [K, N16]
    scale: Tensor  # fp32 [1]: a value is this times its eight bits


@triton.jit(do_not_specialize=["sixteens"])
def _find_largest(x_at, parts_at, sixteens, VALUES: tl.constexpr):
    """Each program's largest bits of |x| in fp32, as integers: NaN is above all numbers."""
    count = sixteens.to(tl.int64) * 16
    largest = tl.zeros([VALUES], tl.int32)
    first = tl.program_id(0).to(tl.int64) * VALUES
    for start in range(first, count, tl.num_programs(0) * VALUES):
        at = start + tl.arange(0, VALUES)
        x = tl.load(x_at + at, mask=at < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(parts_at + tl.program_id(0), tl.max(largest, 0))


@triton.jit(do_not_specialize=["rows", "sixteens"])
def _cast(
    x_at, parts_at, rows_at, columns_at, scale_at, rows, sixteens, width,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of x in eight bits, by rows, by columns or both; program 0 writes the scale."""
    part = tl.arange(0, BLOCK)
    largest = tl.max(tl.load(parts_at + part, mask=part < PARTS, other=0), 0)
    exponent = largest >> 23
    # 1.75 is 0x600000 of a number's own bits; the scale and its inverse are normal numbers.
    shift = tl.minimum(TOP + 127 - exponent - ((largest & 0x7FFFFF) > 0x600000).to(tl.int32), 126)
    is_finite = exponent < 255
    factor = tl.where(is_finite, (127 + shift) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    inverse = tl.where(is_finite, (127 - shift) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_at, inverse)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32) * factor
    if rows_at is not None:
        tl.store(rows_at + at, x.to(rows_at.dtype.element_ty), mask=inside)
    if columns_at is not None:
        padded = sixteens * 16
        at = column.to(tl.int64)[None, :] * padded + row[:, None]
        inside = (row < padded)[:, None] & (column < width)[None, :]
        tl.store(columns_at + at, x.to(columns_at.dtype.element_ty), mask=inside)


def find_largest(x: Tensor) -> Tensor:
    """The largest bits of |x|, by parts: x [N, K], K a multiple of 16 -> int32 [programs]."""
    programs = count_programs(x.device)
    parts = x.new_empty(programs, dtype=torch.int32)
    # Numbers of sixteens, so that the compiler knows where words of 16 bytes begin.
    _find_largest[(programs,)](x, parts, x.numel() // 16, VALUES)
    return parts


def cast(x: Tensor, parts: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool) -> Eight:
    """x [N, K] in eight bits, as it lies and transposed; parts: of `find_largest`."""
    height, width = x.shape
    padded = height + -height % 16
    (programs,) = parts.shape
    eight = Eight(
        x.new_empty(height, width, dtype=dtype) if rows else None,
        x.new_empty(width, padded, dtype=dtype) if columns else None,
        x.new_empty(1, dtype=torch.float32),
    )
    grid = -(-padded // TILE["ROWS"]), -(-width // TILE["COLUMNS"])
    block = 1 << (programs - 1).bit_length()
    _cast[grid](x, parts, *eight, height, padded // 16, width, programs, block, TOP[dtype], **TILE)
    return eight


def quantise(x: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True) -> Eight:
    """`cast` with the largest value of now."""
    x = x.contiguous()
    return cast(x, find_largest(x), dtype, rows=rows, columns=columns)


def multiply(x: Tensor, weight: Eight, bias: Tensor) -> tuple[Tensor, list]:
    """x W^T + b, and what `go_back` needs of x: [N, in] -> [N, out], all bf16."""
    eight = quantise(x, E4M3)
    y = _multiply(eight.rows, eight.scale, weight.rows, weight.scale, bias, fast=True)
    return y, [eight.columns, eight.scale]


def go_back(dy: Tensor, weight: Eight, kept: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight: dy [N, out] -> [N, in], [out, in]."""
    eight = quantise(dy, E5M2)
    dx = _multiply(eight.rows, eight.scale, weight.columns, weight.scale)
    return dx, _multiply(eight.columns, eight.scale, *kept)


def _multiply(a, a_scale, b, b_scale, bias: Tensor | None = None, fast: bool = False) -> Tensor:
    """a b^T in bf16: [M, K], [N, K] -> [M, N]. fast: sums with fewer bits than fp32's."""
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return torch._scaled_mm(a, b.T, a_scale, b_scale, bias=bias, **options)
