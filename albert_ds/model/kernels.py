"""Triton kernels of the encoder and of the MLM loss, for CUDA.

Each gives what torch's operators give in its place (`model/fused.py`, `model/cross_entropy.py`),
with the same roundings to the type of its inputs, and reads and writes every value once. Sums over
tokens are made in fp32 and in one order, so that a run repeats bit for bit.
Shapes: N tokens, H hidden (or any width), P positions, V vocabulary.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

SUM_ROWS = 32  # of a tile of `sum_rows` and of `add_parts`
SUM_COLUMNS, PART_COLUMNS = 128, 32
SCORES = 4096  # of a row of the vocabulary, read at once
DRAWS = 4  # numbers of 32 bits that one Philox counter gives
# Triton compiles again, in the middle of a run, for a number that 16 divides and for a tensor that
# begins at a multiple of 16 bytes. These are so in some micro-batches of text and in others not.
VARYING = {
    "do_not_specialize": ["seed", "rows"],
    "do_not_specialize_on_alignment": ["rstd_at", "labels_at", "total_at"],
}


# A launch costs the host more than a small kernel costs the device, and `triton.cdiv` and questions
# about the device cost as much again: so plain integers, and the answer is kept.
@functools.cache
def count_programs(device: torch.device) -> int:
    """Programs that fill the device, each of which takes many rows."""
    if device.type != "cuda":  # Triton's interpreter
        return 3
    return 3 * torch.cuda.get_device_properties(device).multi_processor_count


def shape_rows(width: int) -> dict:
    """How a program holds a row of this width."""
    block = max(1 << (width - 1).bit_length(), DRAWS)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


# --- LN(x + dropout(added)) ---


@triton.jit
def _scale_kept(values, seed, row, p, BLOCK: tl.constexpr):
    """dropout(values), one row of BLOCK: Philox draws of (seed, index), four a counter."""
    counter = row * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.rand4x(seed, counter)
    drawn = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return tl.where(drawn >= p, values / (1 - p), 0.0)


@triton.jit(**VARYING)
def _norm_forward(
    x_at, added_at, weight_at, bias_at, y_at, sum_at, mean_at, rstd_at,
    width, eps, p, seed, BLOCK: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    x = tl.load(x_at + at, mask=inside, other=0.0)
    added = tl.load(added_at + at, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        added = _scale_kept(added, seed, row, p, BLOCK).to(x.dtype).to(tl.float32)
    total = (x.to(tl.float32) + added).to(x.dtype)
    tl.store(sum_at + at, total, mask=inside)
    total = total.to(tl.float32)
    mean = tl.sum(total, 0) / width
    centred = tl.where(inside, total - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    weight = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_at + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_at + at, (centred * rstd * weight + bias).to(x.dtype), mask=inside)
    tl.store(mean_at + row, mean)
    tl.store(rstd_at + row, rstd)


@triton.jit(**VARYING)
def _norm_backward(
    dy_at, sum_at, weight_at, mean_at, rstd_at, dx_at, dadded_at, dweight_at, dbias_at,
    rows, width, p, seed, BLOCK: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    programs, row = tl.num_programs(0), tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    part_at = row * width + column
    weight = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for _ in range(tl.program_id(0), rows, programs):
        at = row * width + column
        total = tl.load(sum_at + at, mask=inside, other=0.0)
        dy = tl.load(dy_at + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_at + row)
        unit = tl.where(inside, (total.to(tl.float32) - tl.load(mean_at + row)) * rstd, 0.0)
        dweight += dy * unit
        dbias += dy
        scaled = dy * weight
        along, level = tl.sum(scaled * unit, 0) / width, tl.sum(scaled, 0) / width
        dx = ((scaled - level - unit * along) * rstd).to(total.dtype)
        tl.store(dx_at + at, dx, mask=inside)
        if DROPS:
            kept = _scale_kept(dx.to(tl.float32), seed, row, p, BLOCK)
            tl.store(dadded_at + at, kept.to(total.dtype), mask=inside)
        row += programs
    tl.store(dweight_at + part_at, dweight, mask=inside)
    tl.store(dbias_at + part_at, dbias, mask=inside)


class ResidualNorm(torch.autograd.Function):
    """LN(x + dropout(added)): x, added [N, H], weight, bias [H] -> [N, H].

    What is dropped is a function of the seed, so the backward pass draws it again and nothing but
    x + dropout(added) is kept.
    """

    @staticmethod
    def forward(ctx, x, added, weight, bias, eps: float, p: float, seed: int) -> Tensor:
        x, added = x.contiguous(), added.contiguous()
        rows, width = x.shape
        y, total = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = x.new_empty(2, rows, dtype=torch.float32)
        ctx.shape = {**shape_rows(width), "DROPS": p > 0}
        if rows:
            _norm_forward[(rows,)](
                x, added, weight, bias, y, total, mean, rstd, width, eps, p, seed, **ctx.shape
            )
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.p, ctx.seed = p, seed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        total, weight, mean, rstd = ctx.saved_tensors
        rows, width = total.shape
        dx = torch.empty_like(total)
        dadded = torch.empty_like(total) if ctx.p else dx
        programs = min(max(rows, 1), count_programs(total.device))
        parts = total.new_empty(2, programs, width, dtype=torch.float32)
        _norm_backward[(programs,)](
            dy.contiguous(), total, weight, mean, rstd, dx, dadded, *parts,
            rows, width, ctx.p, ctx.seed, **ctx.shape,
        )  # fmt: skip
        dweight, dbias = add_parts(parts, weight.dtype)
        return dx, dadded, dweight, dbias, None, None, None


# --- x W^T + b ---


@triton.jit(**VARYING)
def _sum_tile(x_at, parts_at, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(x_at + at, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        total += x.to(tl.float32)
    tl.store(parts_at + tl.program_id(1) * width + column, tl.sum(total, 0), mask=inside)


@triton.jit
def _add_parts(parts_at, out_at, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    parts_at += tl.program_id(1) * count * width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None] * width + column[None, :]
        total += tl.load(parts_at + at, (row < count)[:, None] & inside[None, :], 0.0)
    tl.store(out_at + tl.program_id(1) * width + column, tl.sum(total, 0), mask=inside)


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of fp32 parts [K, count, H] over count: [K, H] of `dtype`."""
    kinds, count, width = parts.shape
    sums = parts.new_empty(kinds, width, dtype=dtype)
    grid = (-(-width // PART_COLUMNS), kinds)
    _add_parts[grid](parts, sums, count, width, SUM_ROWS, PART_COLUMNS)
    return sums


def sum_rows(x: Tensor) -> Tensor:
    """The sum of the rows of x [N, H], in fp32 and then in x's type: [H]."""
    rows, width = x.shape
    tiles = -(-width // SUM_COLUMNS)
    splits = max(min(-(-rows // SUM_ROWS), count_programs(x.device) // tiles), 1)
    parts = x.new_empty(splits, width, dtype=torch.float32)
    _sum_tile[(tiles, splits)](x.contiguous(), parts, rows, width, SUM_ROWS, SUM_COLUMNS)
    return add_parts(parts.unsqueeze(0), x.dtype).squeeze(0)


class Linear(torch.autograd.Function):
    """x W^T + b: x [N, in], W [out, in], b [out] -> [N, out]. The sum for b's gradient is ours."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        return dx, dy.T @ x, sum_rows(dy)


# --- cross entropies over a vocabulary ---


@triton.jit(**VARYING)
def _entropy_forward(
    logits_at, labels_at, loss_at, total_at, right_at, classes, IGNORED: tl.constexpr,
    SCORES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_at += row * classes
    label = tl.load(labels_at + row)
    highest, best, total = -float("inf"), 0, 0.0
    for first in range(0, classes, SCORES):
        column = first + tl.arange(0, SCORES)
        score = tl.load(logits_at + column, mask=column < classes, other=-float("inf"))
        score = score.to(tl.float32)
        top, place = tl.max(score, 0, return_indices=True)
        best = tl.where(top > highest, first + place, best)
        new = tl.maximum(top, highest)
        total = total * tl.exp(highest - new) + tl.sum(tl.exp(score - new), 0)
        highest = new
    total = tl.log(total) + highest
    counts = label != IGNORED
    chosen = tl.load(logits_at + label, mask=counts, other=0.0).to(tl.float32)
    tl.store(loss_at + row, tl.where(counts, total - chosen, 0.0))
    tl.store(total_at + row, total)
    tl.store(right_at + row, (best == label).to(tl.int64))


@triton.jit(**VARYING)
def _entropy_backward(
    logits_at, labels_at, total_at, gradient_at, of_squares_at, dlogits_at, classes,
    IGNORED: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    label, total = tl.load(labels_at + row), tl.load(total_at + row)
    gradient = tl.where(label == IGNORED, 0.0, tl.load(gradient_at).to(tl.float32))
    column = part * SCORES + tl.arange(0, SCORES)
    at = row * classes + column
    score = tl.load(logits_at + at, mask=column < classes, other=0.0)
    probability = tl.exp(score.to(tl.float32) - total)
    dscore = gradient * tl.where(column == label, probability - 1, probability)
    if of_squares_at is not None:
        tilt = 2 * total * tl.load(of_squares_at).to(tl.float32)
        dscore += tl.where(label == IGNORED, 0.0, tilt) * probability
    tl.store(dlogits_at + at, dscore.to(score.dtype), mask=column < classes)


class CrossEntropy(torch.autograd.Function):
    """`sum_over_vocabulary`: logits [P, V], labels int64 [P] -> loss (fp32), number right (int64),
    and with `z_loss` the sum of log(Z)^2 (fp32).

    Keeps the logits in their own type, and of fp32 one number a row.
    """

    @staticmethod
    def forward(
        ctx, logits: Tensor, labels: Tensor, ignored: int, z_loss: bool
    ) -> tuple[Tensor, ...]:
        logits = logits.contiguous()
        rows, classes = logits.shape
        losses, totals = logits.new_zeros(2, rows, dtype=torch.float32)
        right = torch.zeros_like(labels)
        if rows:
            _entropy_forward[(rows,)](
                logits, labels, losses, totals, right, classes, ignored, SCORES, num_warps=8
            )
        correct = right.sum()
        ctx.save_for_backward(logits, labels, totals)
        ctx.ignored = ignored
        ctx.mark_non_differentiable(correct)
        sums = losses.sum(), correct
        if not z_loss:
            return sums
        return *sums, torch.where(labels == ignored, 0, totals).square().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor, _, of_squares: Tensor | None = None):
        logits, labels, totals = ctx.saved_tensors
        rows, classes = logits.shape
        dlogits = torch.empty_like(logits)
        if rows:
            _entropy_backward[(rows, -(-classes // SCORES))](
                logits, labels, totals, gradient, of_squares, dlogits, classes, ctx.ignored, SCORES,
                num_warps=8,
            )  # fmt: skip
        return dlogits, None, None, None
