"""Steps of the trainer on one GPU, in one process: does the loss fall, and how fast are they?"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.profiler import ProfilerActivity, supported_activities
from torch.profiler import profile as watch

from albert_ds.model.config import SIZES
from albert_ds.parallel.mesh import build_mesh
from albert_ds.process.rendezvous import join_world
from albert_ds.process.world import read_world
from albert_ds.training.metrics import peak_flops
from albert_ds.training.pretrain import Run, next_batch, train_step
from albert_lab.bench_run import bench_config
from albert_lab.gpu_check.records import Records
from albert_lab.host_time import Clock, count_launches, describe_graphs
from albert_lab.measurement import count_step_flops, open_bench_run, take_step
from tools.lab.lamb_bench import time_steps

# (size, micro-batch, checkpointing): what is most wanted comes first; the list is cut where the
# time ends.
CELLS = [
    ("albert-base", 64, "none"),
    ("albert-large", 64, "none"),
    ("albert-xlarge", 32, "none"),
    ("albert-xxlarge", 32, "none"),
    ("albert-base", 128, "none"),
    ("albert-base", 32, "none"),
    ("albert-base", 256, "none"),
    ("albert-large", 128, "none"),
    ("bert-large", 32, "none"),
    ("albert-xxlarge", 64, "none"),
    ("albert-base", 8, "none"),
    ("albert-xxlarge", 32, "block"),
]
UPDATES_AFTER = 4  # cells, the most wanted ones: the updates, and real text
TEXT = [("albert-base", 64, "none"), ("albert-large", 64, "none"), ("albert-base", 8, "none")]
WARM_ON_TEXT = 8  # steps: its micro-batches have several shapes, of which each becomes a graph
WORKERS = 4  # that read it
PROFILED = (CELLS[0], CELLS[1], CELLS[3])
SMOKE = ["zero1_bf16", "zero1_fp32", "zero1_fp16", "zero0_fp32", "zero2_bf16", "zero3_bf16"]
SMOKE += ["zero1_bf16_adamw"]


class Bench:
    """This process's world of one rank, in which engines are built one after the other."""

    def __init__(self, quick: bool):
        self.quick = quick
        self.device = join_world(read_world())
        self.mesh = build_mesh(1)

    def open_run(
        self,
        name: str,
        micro: int,
        checkpointing: str,
        *,
        length: int,
        ds="zero1_bf16",
        data: str = "",
        no_graphs: bool = False,
        **changes,
    ) -> Run:
        """An engine of two micro-batches a step on real text, or on rows of random tokens."""
        lr = changes.pop("lr", None)
        eight_bits = changes.pop("eight_bits", False)
        config = bench_config(
            name,
            replace(SIZES[name], **changes),
            deepspeed_config=f"ds_configs/{ds}.json",
            micro_batch_size=micro,
            sequence_length=length,
            accumulation=2,
            activation_checkpointing=checkpointing,
            data=[data] if data else None,
        )
        config = replace(config, num_workers=WORKERS, no_graphs=no_graphs)
        if eight_bits:
            config.deepspeed["fp8"] = {"enabled": True}
        if lr is not None:
            config.deepspeed["optimizer"]["params"]["lr"] = lr
        return open_bench_run(config, self.mesh, self.device)


def smoke(records: Records, quick: bool) -> None:
    """Every precision and ZeRO stage: 6 steps on one fixed batch; the loss must fall."""
    bench = Bench(quick)

    def take_steps(ds: str, checkpointing: str) -> dict:
        lr = 0.001 if "adamw" in ds else 0.01
        open_run = partial(bench.open_run, vocab_size=2000, num_heads=2, dropout=0.0)
        run = open_run("albert-tiny", 4, checkpointing, length=64, ds=ds, lr=lr)
        batch = next_batch(run)
        losses = []
        for _ in range(6):
            run.window.reset()
            train_step(run, batch)
            losses.append(float(run.window.outputs[0]) / max(batch.counts.masked, 1))
        run.engine.deepspeed.destroy()
        if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
            raise ValueError(f"the loss does not fall: {losses}")
        return {"losses": [round(loss, 4) for loss in losses]}

    for ds, checkpointing in [*((ds, "none") for ds in SMOKE), ("zero1_bf16", "block")]:
        work = partial(take_steps, ds, checkpointing)
        records.measure("smoke", work, config=ds, checkpointing=checkpointing)


def profile(run: Run) -> dict:
    """Kernels of one step: how often each ran and its microseconds, the longest first."""
    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        tokens = take_step(run).counts.tokens
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in trace.events():
        # An annotation, as torch's of an optimizer's step, spans kernels that are there themselves.
        if event.device_type == torch.profiler.DeviceType.CUDA and not event.is_user_annotation:
            spent[event.name[:160]].append(event.device_time)
    rows = sorted(((n, len(us), round(sum(us))) for n, us in spent.items()), key=lambda r: -r[2])
    micros, kernels = sum(row[2] for row in rows), sum(row[1] for row in rows)
    totals = {"kernel_us": micros, "kernels": kernels, "tokens": tokens}
    return {**totals, **count_launches(run), "largest": rows[:45]}


def profile_host(run: Run) -> dict:
    """Operators of one step on the host: how often each ran and its own microseconds."""
    both = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    with watch(activities=both & supported_activities()) as trace:
        take_step(run)
        torch.cuda.synchronize()
    rows = [(e.key[:80], e.count, round(e.self_cpu_time_total)) for e in trace.key_averages()]
    return {"operators": sorted(rows, key=lambda row: -row[2])[:40]}


def measure_speed(
    bench: Bench,
    name: str,
    micro: int,
    checkpointing: str,
    profiled: bool,
    data: str = "",
    most: int = 42,
    eight_bits: bool = False,
) -> dict:
    """Steps of 2.5 seconds, each until the device is done, and at most so many; `data`: on text."""
    times = [time.perf_counter()]
    length = 64 if bench.quick else 512
    run = bench.open_run(
        name, micro, checkpointing, length=length, data=data, eight_bits=eight_bits
    )
    times.append(time.perf_counter())
    seconds: list[float] = []
    rates: list[float] = []  # tokens a second
    shares: list[float] = []  # of the peak
    peak = peak_flops(bench.device)
    clock = Clock()
    enough = 0.2 if bench.quick else 2.5
    warm = WARM_ON_TEXT if data else 2
    while len(seconds) < warm + 3 or (sum(seconds[warm:]) < enough and len(seconds) < most):
        if len(seconds) == warm:  # the engine before is gone by now
            torch.cuda.reset_peak_memory_stats()
            run.window.reset()
            run.span = clock.span
        started = time.perf_counter()
        counts = take_step(run).counts
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        rates.append(counts.tokens / seconds[-1])
        shares.append(count_step_flops(run, counts) / seconds[-1] / (peak or 1))
    first = seconds[0]
    steps = seconds[warm:]
    figures = {
        "tokens_a_second": round(statistics.median(rates[warm:])),
        "mfu": round(statistics.median(shares[warm:]), 4) if peak else None,
        "step_seconds": round(statistics.median(steps), 5),
        "step_seconds_p90": round(float(np.percentile(steps, 90)), 5),
        **clock.describe(len(steps)),
        "fastest": round(min(steps), 5),
        "slowest": round(max(steps), 5),
        "steps": len(steps),
        "loss": round(float(run.window.outputs[0]) / max(run.window.counts.masked, 1), 4),
        "data_wait": round(run.window.data_seconds / sum(steps), 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 3),
        "build_seconds": round(times[1] - times[0], 1),
        "first_step_seconds": round(first, 1),
        **describe_graphs(run),
    }
    if profiled and ProfilerActivity.CUDA in supported_activities():
        figures["profile"] = profile(run)
    run.engine.deepspeed.destroy()
    return figures


def time_updates(name: str) -> dict:
    """Median milliseconds of a step of LAMB, of Muon and of AdamW."""
    seconds = time_steps(name, 5)
    return {kind: round(1e3 * statistics.median(values), 3) for kind, values in seconds.items()}


def measure_speeds(records: Records, quick: bool, data: str) -> None:
    """Sizes and micro-batches in the order of their worth, and what the optimizers take."""
    bench = Bench(quick)
    cells = CELLS
    sizes = ("albert-base", "albert-xxlarge", "albert-large")
    if quick:
        cells = [("albert-tiny", 2, checkpointing) for checkpointing in ("none", "block")]
        sizes = ("albert-tiny",)

    def measure(cell: tuple[str, int, str], rows: str = "random") -> None:
        facts = dict(zip(("size", "micro", "checkpointing"), cell, strict=True), rows=rows)
        has_profile = quick or (cell in PROFILED and records.left() > 30)
        text = data if rows == "text" else ""
        work = partial(measure_speed, bench, *cell, has_profile, text)
        records.measure("speed", work, needs=4 if quick else 15, **facts)

    for number, cell in enumerate(cells, 1):
        measure(cell)
        if number == min(UPDATES_AFTER, len(cells)):
            for cell in TEXT if not quick else cells[:1]:
                measure(cell, rows="text")
            for size in sizes:
                records.measure("optimizer ms", partial(time_updates, size), size=size)
