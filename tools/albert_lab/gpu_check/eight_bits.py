"""Products in eight bits and the kernels around them: how fast, how exact, and what is refused.

A form that the device or torch refuses is a figure of its own: the whole message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from albert_ds.model.config import SIZES
from albert_ds.model.device import has_triton
from albert_lab.gpu_check.rates import random_bf16, time_on_device
from albert_lab.gpu_check.records import Records

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
BRIEF = 0.01  # seconds of the device for one try
# Of the kernel that casts: rows, columns and warps of a program's tile.
TILES = [(128, 128, 8), (64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 64, 8)]


NOT_RUN = {"not run": "no Triton here, or a device without fp8"}


def takes_eight_bits() -> bool:
    return has_triton() and torch.cuda.get_device_capability() >= (8, 9)


def told(work: Callable[[], float]) -> float | str:
    """What `work` finds, or the whole message of what refuses it."""
    try:
        return work()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # any library may refuse
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def multiply(
    a: Tensor,
    b: Tensor,
    scales: str,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> Tensor:
    """a [M, K] times b^T, b [N, K], by torch's product in eight bits with scales of 1.

    scales: `tensor`, `row` (of each operand), or `block` (128 values of a row).
    """
    shapes = {
        "tensor": ((), ()),
        "row": ((len(a), 1), (1, len(b))),
        "block": ((len(a), -(-a.size(1) // 128)), (-(-b.size(1) // 128), len(b))),
    }
    ones = [torch.ones(shape, device=a.device) for shape in shapes[scales]]
    if scales == "block":  # columns are next to each other
        ones = [ones[0].T.contiguous().T, ones[1]]
    first, second = ones
    return torch._scaled_mm(a, b.T, first, second, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def rate_forms(name: str, tokens: int, is_first: bool) -> dict:
    """TFLOP/s of a block's products in bf16 and in every form of eight bits.

    is_first: also forms that are expected to be refused, and how far results are off a product in
    fp32 of the same eight bits.
    """
    config = SIZES[name]
    rates = {}
    h = config.hidden_size
    f = config.ffn_size
    for what, (m, n) in {
        "h x f": (h, f),
        "f x h": (f, h),
        "h x 3h": (h, 3 * h),
        "h x h": (h, h),
    }.items():
        x, w, dy, b = (random_bf16(*s) for s in ((tokens, m), (n, m), (tokens, n), (n,)))
        total = torch.zeros_like(w)
        x8, w8, dy8 = x.to(E4M3), w.to(E4M3), dy.to(E5M2)
        turned = [each.T.contiguous() for each in (x8, w8, dy8)]
        forms = {
            "bf16 forward": lambda x=x, w=w, b=b: F.linear(x, w, b),
            "bf16 dx": lambda dy=dy, w=w: dy @ w,
            "bf16 dw": lambda dy=dy, x=x: dy.T @ x,
            "bf16 dw added": lambda dy=dy, x=x, t=total: t.addmm_(dy.T, x),
        }
        pairs = {
            "forward": (x8, w8, b),
            "dx": (dy8, turned[1], None),
            "dw": (turned[2], turned[0], None),
        }
        for scales in ("tensor", "row"):
            for form, pair in pairs.items():
                for fast in (True, False)[: 1 + (scales == "tensor")]:
                    key = f"{scales} {form}{' fast' * fast}"
                    forms[key] = partial(multiply, *pair[:2], scales, pair[2], fast=fast)
        a, b8, _ = pairs["dw"]
        forms["tensor dw fp32"] = partial(multiply, a, b8, "tensor", dtype=torch.float32)
        forms["tensor dw, then added"] = lambda a=a, b8=b8, t=total: t.add_(
            multiply(a, b8, "tensor")
        )
        if is_first and what == "h x f":
            forms |= forms_of_doubt(x, x8, w8, dy8, turned)
            rates |= compare_forms(pairs)
        work = 2 * tokens * m * n / 1e12
        for form, product in forms.items():
            key = f"{what} {form}"
            rates[key] = told(lambda p=product, w=work: round(w / time_on_device(p, BRIEF), 1))
    return rates


def forms_of_doubt(x: Tensor, x8: Tensor, w8: Tensor, dy8: Tensor, turned: list[Tensor]) -> dict:
    """Products that torch or the device may refuse."""
    one = torch.ones((), device=x.device)

    def lying(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    bias = random_bf16(len(w8))
    return {
        "layout: w transposed in memory": lambda: lying(x8, turned[1].contiguous()),
        "layout: x transposed in memory": lambda: lying(turned[0].T, w8.T),
        "layout: dw of what lies there": lambda: lying(dy8.T, x8),
        "fp32 with a bias": lambda: multiply(x8, w8, "tensor", bias, dtype=torch.float32),
        "rows no multiple of 16": lambda: multiply(x8[:-3], w8, "tensor", bias),
        "dw, rows no multiple of 16": lambda: multiply(
            turned[2][:, :-3].contiguous(), turned[0][:, :-3].contiguous(), "tensor"
        ),
        "both e5m2": lambda: multiply(dy8, turned[1].to(E5M2), "tensor"),
        "block forward": lambda: multiply(x8, w8, "block"),
        "into given memory": lambda: torch._scaled_mm(
            x8, w8.T, one, one, out_dtype=torch.bfloat16, out=random_bf16(len(x8), len(w8))
        ),
    }


def compare_forms(pairs: dict) -> dict:
    """The difference to a product in fp32 of the same eight bits, over the latter's norm.

    0.0017 is one rounding to bf16.
    """
    distances = {}
    for form, (a, b, _) in pairs.items():
        exact = a.float() @ b.float().T
        for scales in ("tensor", "row"):
            for fast in (True, False):

                def off(a=a, b=b, scales=scales, fast=fast, exact=exact) -> float:
                    made = multiply(a, b, scales, fast=fast).float()
                    return round(float((made - exact).norm() / exact.norm()), 6)

                distances[f"{scales} {form}{' fast' * fast} off"] = told(off)
    return distances


def check_casts() -> dict:
    """The kernels give torch's own casts bit for bit; ValueError where they do not."""
    from albert_ds.model import fp8  # imports Triton

    wrong = {}
    for dtype in (E4M3, E5M2):
        for rows, width, factor in ((1000, 4096, 1.0), (33, 48, 1e-8), (4096, 2048, 3e4)):
            x = random_bf16(rows, width) * random_bf16(rows, 1).exp() * factor
            made = fp8.quantise(x, dtype)
            assert made.rows is not None and made.columns is not None
            scaled = x.float() / made.scale
            top = float(scaled.abs().max())
            limit = torch.finfo(dtype).max
            expected = scaled.to(dtype).view(torch.uint8)
            turned = made.columns.view(torch.uint8)
            checks = {
                "rows": torch.equal(made.rows.view(torch.uint8), expected),
                "columns": torch.equal(turned[:, :rows].T, expected),
                "filling": not turned[:, rows:].any(),
                "scale": limit / 2 < top <= limit,
            }
            wrong |= {f"{dtype} {rows}: {k}": top for k, good in checks.items() if not good}
    for value, scale in ((0.0, 2.0**-126), (float("inf"), None), (float("nan"), None)):
        x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
        x[3, 5] = value
        made = fp8.quantise(x, E4M3)
        cast_scale = float(made.scale)
        if cast_scale != scale if scale else cast_scale == cast_scale:
            wrong[f"scale of {value}"] = cast_scale
    if wrong:
        raise ValueError(f"other than torch's casts: {wrong}")
    return {"casts": "torch's, bit for bit"}


def rate_casts(shapes: list[tuple[int, int]]) -> dict:
    """GB/s of the kernels, by what they must read and write."""
    from albert_ds.model import fp8

    rates = {}

    def rate(what: str, total: int, work: Callable[[], object]) -> None:
        rates[what] = told(lambda: round(total / time_on_device(work, BRIEF) / 1e9))

    for n, k in shapes:
        x = random_bf16(n, k)
        cells = n * k
        parts = fp8.find_largest(x)
        rate(f"{n} x {k} largest", 2 * cells, partial(fp8.find_largest, x))
        rate(f"{n} x {k} torch's", 2 * cells, lambda x=x: torch.linalg.vector_norm(x, torch.inf))
        if (n, k) == shapes[0]:
            for rows, columns, warps in TILES:
                fp8.TILE = {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}
                work = partial(fp8.cast, x, parts, E4M3, rows=True, columns=True)
                rate(f"{n} x {k} both, tile {rows} x {columns}, {warps} warps", 4 * cells, work)
            fp8.TILE = dict(zip(fp8.TILE, TILES[0], strict=True))
        for what, rows, columns in (("both", 1, 1), ("rows", 1, 0), ("columns", 0, 1)):
            work = partial(fp8.cast, x, parts, E4M3, rows=bool(rows), columns=bool(columns))
            rate(f"{n} x {k} {what}", (2 + rows + columns) * cells, work)
        total = torch.zeros_like(x)
        rate(f"{n} x {k} add bf16", 6 * cells, lambda t=total, x=x: t.add_(x))
    return rates


def measure_eight_bits(records: Records, quick: bool) -> None:
    """Products and casts at the shapes of xxlarge and xlarge."""
    measure = partial(records.measure, needs=1)
    first, second = ("albert-tiny", "albert-tiny") if quick else ("albert-xxlarge", "albert-xlarge")
    tokens = 32 if quick else 16384
    measure("fp8 products TFLOP/s", partial(rate_forms, first, tokens, True), size=first)
    measure("fp8 products TFLOP/s", partial(rate_forms, second, tokens, False), size=second)
    if takes_eight_bits():
        measure("fp8 casts", check_casts)
        shapes = [(tokens, 256)] if quick else [(tokens, 16384), (tokens, 4096), (tokens, 2048)]
        measure("fp8 casts GB/s", partial(rate_casts, shapes))
    else:
        measure("fp8 casts", lambda: NOT_RUN)
