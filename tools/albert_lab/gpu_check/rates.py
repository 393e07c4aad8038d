"""What a GPU can do: memory, matrix products, attention, copies, and the cost of a launch.

Each figure is the median of several tries, timed by events on the device.
`tools/scaling_model.py plan` takes those of the machine as the hardware.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.cuda import nccl
from torch.nn.attention import SDPBackend, sdpa_kernel

from albert_ds.checkpoint.run_folder import read_versions
from albert_ds.model.config import SIZES
from albert_ds.training.metrics import peak_flops
from albert_lab.gpu_check.records import Records

TRIES = 9
DRIVER = "driver_version,clocks.sm,clocks.max.sm,power.limit"  # of nvidia-smi


def time_on_device(work: Callable[[], object], least: float = 0.05) -> float:
    """Median seconds of one `work`."""

    def once(count: int) -> float:
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(count):
            work()
        done.record()
        torch.cuda.synchronize()
        return begun.elapsed_time(done) / 1e3 / count

    work()
    torch.cuda.synchronize()
    count = max(1, min(200, int(least / max(once(2), 1e-6))))
    return max(statistics.median(once(count) for _ in range(5)), 1e-9)


def measure_products(width: int) -> dict[str, float]:
    """TFLOP/s of a square matrix product by type of number."""
    rates = {}
    for name in ("bfloat16", "float16", "float32"):
        a, b = (torch.randn(width, width, device="cuda").to(getattr(torch, name)) for _ in range(2))
        rates[name] = 2 * width**3 / time_on_device(lambda a=a, b=b: a @ b) / 1e12
    return rates


def measure_copies(megabytes: int) -> dict[str, float]:
    """GB/s of copies between host and device, from pinned and from ordinary memory."""
    there = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    ordinary = torch.empty(megabytes << 20, dtype=torch.uint8)
    pinned = ordinary.pin_memory()
    moves = {
        "pinned_to_device": lambda: there.copy_(pinned, non_blocking=True),
        "to_device": lambda: there.copy_(ordinary),
        "to_pinned": lambda: pinned.copy_(there, non_blocking=True),
        "to_host": lambda: ordinary.copy_(there),
    }
    return {name: there.numel() / time_on_device(move) / 1e9 for name, move in moves.items()}


def measure_launches(count: int) -> dict[str, float]:
    """Microseconds of the host for a small kernel, and until a single one is known to be done."""
    x = torch.zeros(8, device="cuda")
    launches, waits = [], []
    for _ in range(TRIES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            x.add_(1)
        launches.append((time.perf_counter() - started) / count)
        torch.cuda.synchronize()
        started = time.perf_counter()
        x.add_(1)
        torch.cuda.synchronize()
        waits.append(time.perf_counter() - started)
    return {"a_launch": 1e6 * statistics.median(launches), "a_wait": 1e6 * statistics.median(waits)}


def describe_machine(quick: bool) -> dict:
    megabytes = 4 if quick else 1024
    source, target = (torch.zeros(megabytes << 20, dtype=torch.uint8, device="cuda") for _ in "ab")
    copied = 2 * source.numel() / time_on_device(lambda: target.copy_(source))
    products = measure_products(256 if quick else 8192)
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability()),
        "driver": ask_driver(),
        "cores": os.cpu_count(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "peak_flops": peak_flops(torch.device("cuda", 0)),
        "versions": {
            **read_versions(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl.version())),
        },
        "memory_bandwidth_gb_s": copied / 1e9,
        "bf16_tflops": products["bfloat16"],
        "fp16_tflops": products["float16"],
        "fp32_tflops": products["float32"],
        "copies_gb_s": measure_copies(4 if quick else 256),
        "microseconds": measure_launches(50 if quick else 2000),
    }


def ask_driver() -> str:
    """Its version, and the clocks and the power that the device may take."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={DRIVER}", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "no nvidia-smi"
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def random_bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def rate_products(name: str, tokens: int) -> dict:
    """TFLOP/s of a block's matrix products, forward and backward, and GB/s of a bias's sum."""
    config = SIZES[name]
    rates = {}
    h = config.hidden_size
    f = config.ffn_size
    for what, (m, n) in {
        "h x h": (h, h),
        "h x 3h": (h, 3 * h),
        "h x f": (h, f),
        "f x h": (f, h),
    }.items():
        x, w, dy, b = (random_bf16(*s) for s in ((tokens, m), (n, m), (tokens, n), (n,)))
        total = torch.zeros(n, m, device="cuda")
        work = 2 * tokens * m * n / 1e12
        forms = {
            "forward": lambda x=x, w=w, b=b: F.linear(x, w, b),
            "dx": lambda dy=dy, w=w: dy @ w,
            "dw": lambda dy=dy, x=x: dy.T @ x,
            "dw fp32 sum": lambda dy=dy, x=x, total=total: torch.addmm(
                total, dy.T, x, out_dtype=torch.float32, out=total
            ),
        }
        for form, product in forms.items():
            rates[f"{what} {form}"] = round(work / time_on_device(product), 1)
        gigabytes = dy.numel() * 2 / 1e9
        rates[f"{what} db GB/s"] = round(gigabytes / time_on_device(lambda dy=dy: dy.sum(0)), 1)
    return rates


def rate_attention(name: str, tokens: int, length: int, dropout: float) -> dict:
    """TFLOP/s of each kernel, forward and both ways; packed rows are [tokens, heads, width]."""
    heads = SIZES[name].num_heads
    width = SIZES[name].hidden_size // heads
    packed = [random_bf16(tokens, heads, width).requires_grad_() for _ in "qkv"]
    rows = [
        x.detach().view(-1, length, heads, width).transpose(1, 2).requires_grad_() for x in packed
    ]
    ends = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    work = 4 * tokens * length * heads * width / 1e12
    sizes = (ends, ends, length, length)

    def flash():
        forward = torch.ops.aten._flash_attention_forward
        return forward(*packed, *sizes, dropout, False, False)[0]

    def cudnn():
        forward = torch.ops.aten._cudnn_attention_forward
        return forward(*packed, None, *sizes, True, dropout, False, False)[0]

    def dense(backend: SDPBackend):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*rows, dropout_p=dropout)

    kernels = {
        "flash varlen": (flash, packed),
        "cudnn varlen": (cudnn, packed),
        "dense flash": (partial(dense, SDPBackend.FLASH_ATTENTION), rows),
        "dense cudnn": (partial(dense, SDPBackend.CUDNN_ATTENTION), rows),
    }
    rates: dict = {}
    for kind, (attend, inputs) in kernels.items():
        try:
            grad = torch.randn_like(attend())
            forward = time_on_device(lambda attend=attend: attend().detach())
            both = time_on_device(lambda a=attend, i=inputs, g=grad: torch.autograd.grad(a(), i, g))
            rates[f"{kind} forward"] = round(work / forward, 1)
            rates[f"{kind} both"] = round(3.5 * work / both, 1)
        except RuntimeError as error:  # a kernel that this device lacks
            rates[kind] = str(error)[:120]
    if not dropout and "cudnn varlen both" in rates:
        off = (cudnn().float() - flash().float()).norm() / flash().float().norm()
        rates["cudnn off flash"] = round(float(off), 5)
    return rates


def measure_shapes(records: Records, quick: bool) -> None:
    """Products and attention at the shapes of each size."""
    tokens, length = (256, 64) if quick else (16384, 512)
    sizes = ("albert-base", "albert-xxlarge", "albert-large", "albert-xlarge")
    for name in ("albert-tiny",) if quick else sizes:
        records.measure("products TFLOP/s", partial(rate_products, name, tokens), size=name)
        for p in (0.0, 0.1):
            rate = partial(rate_attention, name, tokens, length, p)
            records.measure("attention TFLOP/s", rate, size=name, dropout=p)
