"""What a GPU can do: `python -m albert_lab.gpu_check.machine --output FILE [--quick]`.

Memory bandwidth, matrix products, copies from and to the host, and the cost of launching a kernel:
each the median of several tries, timed by events on the device. `tools/scaling_model.py plan` takes
FILE as the hardware.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from albert_ds import cli
from albert_ds.files import write_report

TRIES = 9


def build_parser() -> cli.Parser:
    parser = cli.Parser(prog="albert_lab.gpu_check.machine", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON with every figure")
    parser.add_argument("--quick", action="store_true", help="small tensors; figures mean nothing")
    return parser


def time_on_device(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of one `work`, over several tries of `repeats` in a row."""
    import torch

    seconds = []
    for _ in range(TRIES + 1):  # the first one warms up
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(repeats):
            work()
        done.record()
        torch.cuda.synchronize()
        seconds.append(begun.elapsed_time(done) / 1e3 / repeats)
    return max(statistics.median(seconds[1:]), 1e-12)


def measure_products(width: int) -> dict[str, float]:
    """TFLOP/s of a square matrix product by type of number."""
    import torch

    found = {}
    for name in ("bfloat16", "float16", "float32"):
        a, b = (torch.randn(width, width, device="cuda").to(getattr(torch, name)) for _ in range(2))
        found[name] = 2 * width**3 / time_on_device(lambda a=a, b=b: a @ b, 5) / 1e12
    return found


def measure_copies(megabytes: int) -> dict[str, float]:
    """GB/s of copies between host and device, from pinned and from ordinary memory."""
    import torch

    there = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    ordinary = torch.empty(megabytes << 20, dtype=torch.uint8)
    pinned = ordinary.pin_memory()
    moves = {
        "pinned_to_device": lambda: there.copy_(pinned, non_blocking=True),
        "to_device": lambda: there.copy_(ordinary),
        "to_pinned": lambda: pinned.copy_(there, non_blocking=True),
        "to_host": lambda: ordinary.copy_(there),
    }
    return {name: there.numel() / time_on_device(move, 3) / 1e9 for name, move in moves.items()}


def measure_launches(count: int) -> dict[str, float]:
    """Microseconds of the host for a small kernel, and until a single one is known to be done."""
    import torch

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


def measure(quick: bool) -> dict:
    import torch

    from albert_ds.process.run_folder import read_versions
    from albert_ds.report.metrics import peak_flops

    megabytes = 4 if quick else 1024
    source, target = (torch.zeros(megabytes << 20, dtype=torch.uint8, device="cuda") for _ in "ab")
    copied = 2 * source.numel() / time_on_device(lambda: target.copy_(source), 5)
    products, properties = (
        measure_products(256 if quick else 8192),
        torch.cuda.get_device_properties(0),
    )
    return {
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability()),
        "peak_flops": peak_flops(torch.device("cuda", 0)),
        "versions": {**read_versions(), "cuda": torch.version.cuda, "nccl": read_nccl()},
        "memory_bandwidth_gb_s": copied / 1e9,
        "bf16_tflops": products["bfloat16"],
        "fp16_tflops": products["float16"],
        "fp32_tflops": products["float32"],
        "copies_gb_s": measure_copies(4 if quick else 256),
        "microseconds": measure_launches(50 if quick else 2000),
    }


def read_nccl() -> str:
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    write_report(args.output, measure(args.quick))


if __name__ == "__main__":
    cli.run(main)
