"""Triton kernels of the encoder and of the MLM loss, for CUDA.

Each gives what torch's operators give in its place (`model/fused.py`, `model/cross_entropy.py`),
with the same roundings to the type of its inputs, and reads and writes every value once. Sums over
tokens are made in fp32 and in one order, so that a run repeats bit for bit.
Shapes: N tokens, H hidden (or any width), P positions, V vocabulary.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from albert_ds.model.draws import Draws

SUM_ROWS = 32  # of a tile of `sum_rows` and of `add_parts`
SUM_COLUMNS, PART_COLUMNS = 128, 32
SCORES = 4096  # of a row of the vocabulary, read at once
DRAWS = 4  # numbers of 32 bits that one Philox counter gives
# Triton compiles again, in the middle of a run, for a number that 16 divides and for a tensor that
# begins at a multiple of 16 bytes. These are so in some micro-batches of text and in others not.
VARYING = {
    "do_not_specialize": ["site", "rows"],
    "do_not_specialize_on_alignment": ["rstd_at", "labels_at", "total_at", "seeds_at"],
}


# Gives room of a shape [K, programs, width] for fp32 parts of sums, and whether to add to what is
# there.
PartialSums = Callable[[tuple[int, int, int], torch.device], tuple[Tensor, bool]]


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
def _scale_kept(values, seed, p, BLOCK: tl.constexpr):
    """dropout(values), one row of BLOCK: Philox draws of (seed, index), four a counter."""
    a, b, c, d = tl.rand4x(seed, tl.arange(0, BLOCK // 4))
    drawn = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return tl.where(drawn >= p, values / (1 - p), 0.0)


@triton.jit
def _store_part(part_at, total, inside, ADDS: tl.constexpr):
    """A program's part of a sum over rows, to which that of earlier layers is added."""
    if ADDS:
        total += tl.load(part_at, mask=inside, other=0.0)
    tl.store(part_at, total, mask=inside)


@triton.jit(**VARYING)
def _norm_forward(
    x_at, added_at, weight_at, bias_at, y_at, sum_at, mean_at, rstd_at, seeds_at,
    width, eps, p, site, BLOCK: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    x = tl.load(x_at + at, mask=inside, other=0.0)
    added = tl.load(added_at + at, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        seed = tl.load(seeds_at + row) + site
        added = _scale_kept(added, seed, p, BLOCK).to(x.dtype).to(tl.float32)
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
    dy_at, sum_at, weight_at, mean_at, rstd_at, dx_at, dadded_at, parts_at, seeds_at,
    rows, width, p, site, BLOCK: tl.constexpr, DROPS: tl.constexpr, KINDS: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    parts_at += row * width + column
    weight = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    of_added = tl.zeros([BLOCK], tl.float32)
    for _ in range(tl.program_id(0), rows, programs):
        at = row * width + column
        total = tl.load(sum_at + at, mask=inside, other=0.0)
        dy = tl.load(dy_at + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_at + row)
        unit = tl.where(inside, (total.to(tl.float32) - tl.load(mean_at + row)) * rstd, 0.0)
        dweight += dy * unit
        dbias += dy
        scaled = dy * weight
        along = tl.sum(scaled * unit, 0) / width
        level = tl.sum(scaled, 0) / width
        dx = ((scaled - level - unit * along) * rstd).to(total.dtype)
        tl.store(dx_at + at, dx, mask=inside)
        if DROPS:
            seed = tl.load(seeds_at + row) + site
            dx = _scale_kept(dx.to(tl.float32), seed, p, BLOCK).to(total.dtype)
            tl.store(dadded_at + at, dx, mask=inside)
        of_added += dx.to(tl.float32)
        row += programs
    _store_part(parts_at, dweight, inside, ADDS)
    _store_part(parts_at + programs * width, dbias, inside, ADDS)
    if KINDS == 3:
        _store_part(parts_at + 2 * programs * width, of_added, inside, ADDS)


def run_norm(
    ctx, x, added, weight, bias, eps: float, p: float, draws: Draws | None
) -> list[Tensor]:
    """LN(x + dropout(added)), then the four tensors that `run_norm_backward` needs of it."""
    x, added = x.contiguous(), added.contiguous()
    rows, width = x.shape
    y, total = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = x.new_empty(2, rows, dtype=torch.float32)
    ctx.p = p
    ctx.shape = {**shape_rows(width), "DROPS": p > 0}
    ctx.seeds, ctx.site = (draws.seeds, draws.number()) if draws else (None, 0)
    if rows:
        _norm_forward[(rows,)](
            x, added, weight, bias, y, total, mean, rstd, ctx.seeds, width, eps, p, ctx.site,
            **ctx.shape,
        )  # fmt: skip
    return [y, total, weight, mean, rstd]


def run_norm_backward(ctx, dy, parts, adds, total, weight, mean, rstd) -> tuple[Tensor, Tensor]:
    """The gradients of x and `added`.

    parts: fp32 [K, programs, H], for sums over the rows: of weight, bias and, if K is 3, of the
    gradient of `added`. They are added to what is there if `adds`.
    """
    rows, width = total.shape
    dx = torch.empty_like(total)
    dadded = torch.empty_like(total) if ctx.p else dx
    kinds, programs, _ = parts.shape
    _norm_backward[(programs,)](
        dy.contiguous(), total, weight, mean, rstd, dx, dadded, parts, ctx.seeds,
        rows, width, ctx.p, ctx.site, **ctx.shape, KINDS=kinds, ADDS=adds,
    )  # fmt: skip
    return dx, dadded


class ResidualNorm(torch.autograd.Function):
    """LN(x + dropout(added)): x, added [N, H], weight, bias [H] -> [N, H].

    What is dropped is a function of the seeds, so the backward pass draws it again and nothing but
    x + dropout(added) is kept.
    """

    @staticmethod
    def forward(ctx, x, added, weight, bias, eps: float, p: float, draws: Draws | None) -> Tensor:
        y, *kept = run_norm(ctx, x, added, weight, bias, eps, p, draws)
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        shape = 2, count_programs(dy.device), dy.size(1)
        parts = dy.new_empty(shape, dtype=torch.float32)
        dx, dadded = run_norm_backward(ctx, dy, parts, False, *ctx.saved_tensors)
        return dx, dadded, *add_parts(parts, dy.dtype), None, None, None


# --- dropout(x) ---


@triton.jit(**VARYING)
def _drop(x_at, y_at, seeds_at, width, p, site, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = row * width + column
    inside = column < width
    x = tl.load(x_at + at, mask=inside, other=0.0)
    kept = _scale_kept(x.to(tl.float32), tl.load(seeds_at + row) + site, p, BLOCK)
    tl.store(y_at + at, kept.to(x.dtype), mask=inside)


class Drop(torch.autograd.Function):
    """dropout(x): [N, H] -> [N, H]. The backward pass draws again; nothing is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float, seeds: Tensor, number: int) -> Tensor:
        ctx.dropout = p, seeds, number
        x = x.contiguous()
        y = torch.empty_like(x)
        rows, width = x.shape
        if rows:
            _drop[(rows,)](x, y, seeds, width, p, number, **shape_rows(width))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        return Drop.apply(dy, *ctx.dropout), None, None, None


# --- x W^T + b ---


@triton.jit
def _gelu_slope(x):
    """The slope of gelu(x) = x sigmoid(u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    e = tl.exp(-tl.abs(u))
    s = tl.where(u < 0, e, 1.0) / (1 + e)
    return s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)


@triton.jit(**VARYING)
def _gelu_backward(
    dy_at, x_at, dx_at, parts_at, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        x = tl.load(x_at + at, mask=mask, other=0.0)
        dy = tl.load(dy_at + at, mask=mask, other=0.0).to(tl.float32)
        dx = (dy * _gelu_slope(x.to(tl.float32))).to(x.dtype)
        tl.store(dx_at + at, dx, mask=mask)
        total += dx.to(tl.float32)
    _store_part(parts_at + tl.program_id(1) * width + column, tl.sum(total, 0), inside, ADDS)


@triton.jit(**VARYING)
def _join(
    q_at, k_at, v_at, joined_at, parts_at, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Three matrices of `width` side by side."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    which = tl.program_id(2)
    from_at = q_at
    if which == 1:
        from_at = k_at
    elif which == 2:
        from_at = v_at
    joined_at += which * width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        mask = (row < rows)[:, None] & inside[None, :]
        x = tl.load(from_at + at * width + column[None, :], mask=mask, other=0.0)
        tl.store(joined_at + at * 3 * width + column[None, :], x, mask=mask)
        total += x.to(tl.float32)
    parts_at += tl.program_id(1) * 3 * width + which * width
    _store_part(parts_at + column, tl.sum(total, 0), inside, ADDS)


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


def cut_tiles(width: int, kinds: int, device: torch.device) -> tuple[int, int, int]:
    """A grid of programs for the tiles of kinds x [rows, width], which sum over any rows."""
    tiles = -(-width // SUM_COLUMNS)
    return tiles, max(count_programs(device) // (tiles * kinds), 1), kinds


def sum_rows(x: Tensor) -> Tensor:
    """The sum of the rows of x [N, H], in fp32 and then in x's type: [H]."""
    rows, width = x.shape
    grid = cut_tiles(width, 1, x.device)
    parts = x.new_empty(1, grid[1], width, dtype=torch.float32)
    _sum_tile[grid](x.contiguous(), parts, rows, width, SUM_ROWS, SUM_COLUMNS)
    return add_parts(parts, x.dtype).squeeze(0)


def run_gelu_backward(dy: Tensor, x: Tensor, partial_sums: PartialSums) -> Tensor:
    """The gradient of x from that of gelu(x), and parts of its sum over rows: [N, F] each."""
    dx = torch.empty_like(x)
    rows, width = x.shape
    grid = cut_tiles(width, 1, x.device)
    parts, adds = partial_sums((1, grid[1], width), x.device)
    _gelu_backward[grid](dy.contiguous(), x, dx, parts, rows, width, SUM_ROWS, SUM_COLUMNS, adds)
    return dx


def join(q: Tensor, k: Tensor, v: Tensor, partial_sums: PartialSums) -> Tensor:
    """Three of [N, H] side by side, [N, 3H], and parts of its sum over rows."""
    rows, width = q.shape
    joined = q.new_empty(rows, 3 * width)
    grid = cut_tiles(width, 3, q.device)
    parts, adds = partial_sums((1, grid[1], 3 * width), q.device)
    three = (x.contiguous() for x in (q, k, v))
    _join[grid](*three, joined, parts, rows, width, SUM_ROWS, SUM_COLUMNS, adds)
    return joined


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
    highest = -float("inf")
    best = 0
    total = 0.0
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
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
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
