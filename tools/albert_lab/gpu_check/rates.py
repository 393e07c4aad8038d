"""What a GPU can do: memory, matrix products, copies, and the cost of a launch.

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

import torch
from torch.cuda import nccl

from albert_ds.process.run_folder import read_versions
from albert_ds.report.metrics import peak_flops

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
    found = {}
    for name in ("bfloat16", "float16", "float32"):
        a, b = (torch.randn(width, width, device="cuda").to(getattr(torch, name)) for _ in range(2))
        found[name] = 2 * width**3 / time_on_device(lambda a=a, b=b: a @ b) / 1e12
    return found


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
