"""The trainer's own engine and steps, measured: models in one layout, in turns.

The tools that compare speed, memory and traffic all use it, so each measures the trainer itself.
In each round all models take steps (A B A B ...). A slow drift of the machine's speed then cancels
in the ratio of two neighbours.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from albert_ds.base.files import MARK
from albert_ds.data.micro_batch import MicroBatch, collate
from albert_ds.data.samples import Sample
from albert_ds.data.shards import ShardSet, open_shards
from albert_ds.data.stream_config import StreamConfig
from albert_ds.engine.deepspeed_config import check_device, check_eight_bits, precision_of
from albert_ds.model.config import count_flops
from albert_ds.model.shapes import count_params
from albert_ds.parallel.consensus import Counts
from albert_ds.parallel.mesh import Mesh
from albert_ds.settings.pretrain import RunConfig
from albert_ds.training.metrics import Window
from albert_ds.training.pretrain import (
    Batch,
    Run,
    build,
    has_fixed_shapes,
    next_batch,
    open_stream,
    train_step,
)
from albert_ds.vocab.vocab import NUM_FIXED
from albert_lab.bench_run import accumulation_of, stage_of
from albert_lab.comm_trace import sum_up
from albert_lab.host_time import measure_host
from albert_lab.peak_memory import PeakMemory
from albert_lab.step_breakdown import split, watch
from albert_lab.tables import PARTS, SECONDS
from albert_lab.traffic import Traffic

SYNTHETIC = 8  # micro-batches


def open_bench_run(config: RunConfig, mesh: Mesh, device: torch.device) -> Run:
    """The engine and its batches, ready to step. Collective."""
    if config.data:
        batches = open_stream(config, open_sources(config), mesh, 0, device)
    else:
        batches = synthetic_batches(
            config.stream,
            vocab_size=config.model.vocab_size,
            micro_batch_size=config.micro_batch_size,
            seed=mesh.dp_rank,
            fixed=has_fixed_shapes(config, mesh, device),
        )
        batches = cycle([x.pin_memory() if device.type == "cuda" else x for x in batches])
    file = Path(config.deepspeed_config)
    layout = {"tensor_parallel": config.tensor_parallel}
    check_device(file, config.deepspeed, **layout)
    check_eight_bits(file, config.deepspeed, config.model, **layout)
    return Run(
        config=config,
        mesh=mesh,
        device=device,
        engine=build(config, mesh, device),
        batches=batches,
        window=Window(device),
    )


def open_sources(config: RunConfig) -> list[ShardSet]:
    return [open_shards(folder, "train") for folder in config.data]


def synthetic_batches(
    config: StreamConfig,
    *,
    vocab_size: int,
    micro_batch_size: int,
    seed: int,
    fixed: bool = False,
) -> Iterator[MicroBatch]:
    """A few micro-batches of rows of `sequence_length` random tokens, without padding.

    They are made beforehand, as workers make the trainer's while the device computes.
    """
    rng = np.random.default_rng(seed)
    length = config.sequence_length
    masked = max(1, round(config.masked_fraction * length))
    for number in range(SYNTHETIC):
        samples = [
            Sample(
                ids=rng.integers(NUM_FIXED, vocab_size, length),
                first=length // 2,
                positions=np.sort(rng.choice(length, masked, replace=False)),
                labels=rng.integers(NUM_FIXED, vocab_size, masked),
                pair_label=int(rng.integers(2)),
                used=length,
                available=length,
                starts=np.ones(length, bool),
            )
            for _ in range(micro_batch_size)
        ]
        begin = number * len(samples)
        yield collate(samples, [*range(begin, begin + len(samples))], config, fixed=fixed)


def count_parameters(run: Run) -> int:
    """Unique parameters of one rank's part of the model, before ZeRO partitions them."""
    engine = run.engine
    return sum(
        shape.numel() // (1 if engine.shard_dims[name] is None else run.mesh.tp_size)
        for name, shape in engine.shapes.items()
    )


def take_step(run: Run) -> Batch:
    """One optimizer step of the trainer; returns the batch it used. Collective."""
    batch = next_batch(run)
    train_step(run, batch)
    return batch


@dataclass(kw_only=True, slots=True)
class Measurement:
    """A model and its measured rounds."""

    run: Run
    peak_memory: int | None  # bytes of the fullest rank; None without a warm-up step
    process_memory: int  # of these, bytes that the process held before the first model
    on_cuda: dict  # what torch reserved, as `peak_memory`; the host's part of a step
    rounds: list[dict] = field(default_factory=list)


def open_cells(
    configs: list[RunConfig],
    mesh: Mesh,
    device: torch.device,
    *,
    warmup: int,
    base: int | None = None,
) -> list[Measurement]:
    """Build every model and take its `warmup` steps. Collective.

    base: bytes that the process held before its first model.
    """
    cells: list[Measurement] = []
    for config in configs:
        memory = PeakMemory(device, base)
        base = memory.base
        run = open_bench_run(config, mesh, device)
        memory.restart()
        for _ in range(warmup):
            take_step(run)
        reads = [memory.read, memory.read_reserved] if device.type == "cuda" else [memory.read]
        peaks = torch.tensor([read() for read in reads])
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=mesh.control_group)
        peak, *reserved = peaks.tolist() if warmup else [None]
        on_cuda = {"reserved_gb": round(reserved[0] / 1e9, 3)} if reserved else {}
        cells.append(Measurement(run=run, peak_memory=peak, process_memory=base, on_cuda=on_cuda))
    return cells


def take_turns(cells: list[Measurement], traffic: Traffic, *, rounds: int, steps: int) -> None:
    """Measure every cell `rounds` times, and on CUDA the host's part of its steps. Collective."""
    for _ in range(rounds):
        for cell in cells:
            turn = measure_round(cell.run, steps, traffic)
            cell.rounds.append({**turn, "peak_memory": cell.peak_memory})
    for cell in cells:
        if cell.run.device.type == "cuda":
            cell.on_cuda |= measure_host(cell.run)


def close(cells: list[Measurement]) -> None:
    """Free the engines."""
    for cell in cells:
        cell.run.engine.deepspeed.destroy()
    cells.clear()


def leave_world(mesh: Mesh) -> None:
    """Leave the process group after all ranks have come here.

    A launcher kills the remaining ranks when one leaves; waiting lets each finish its writing.
    """
    dist.barrier(group=mesh.control_group)
    dist.destroy_process_group()


def measure_round(run: Run, steps: int, traffic: Traffic) -> dict:
    """Take `steps` optimizer steps; returns the mean per step over all ranks. Collective."""
    dist.barrier(group=run.mesh.control_group)
    with watch(run, traffic) as stopwatch:
        started = time.perf_counter()
        batches = []
        for _ in range(steps):
            with stopwatch.span("other"):
                batches.append(take_step(run))
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    spans = stopwatch.spans()
    durations = split(spans)
    volumes = sum_up(stopwatch.events, run.mesh, stopwatch.clock)
    record = {
        "seconds_a_step": seconds / steps,
        "step_seconds": [span.ended - span.begun for span in spans if span.part == "other"],
        **{SECONDS[part]: durations[part] / steps for part in PARTS},
        "kinds": {kind: volume.report(steps) for kind, volume in volumes.items()},
    }
    everyone: list[dict] = [{}] * run.mesh.world_size
    dist.all_gather_object(everyone, record, group=run.mesh.control_group)
    return _describe_round(run, everyone, batches)


def _describe_round(run: Run, everyone: list[dict], batches: list) -> dict:
    """The round as the report has it: times are means over ranks, traffic is that of rank 0."""
    first = everyone[0]
    steps = len(batches)
    times = ("seconds_a_step", *SECONDS.values())
    mean = {name: statistics.fmean(rank[name] for rank in everyone) for name in times}
    each = [rank["step_seconds"] for rank in everyone]
    seconds = mean["seconds_a_step"]
    tokens = sum(batch.counts.tokens for batch in batches) / steps
    flops = sum(count_step_flops(run, batch.counts) for batch in batches) / steps
    return {
        **mean,
        "step_seconds": [statistics.fmean(ranks) for ranks in zip(*each, strict=True)],
        "samples_a_second": run.config.batch_size / seconds,
        "tokens_a_second": tokens / seconds,
        "flops_a_step": flops,  # of the model, over all ranks
        "flops_a_second": flops / seconds,
        "wire_bytes_a_step": sum(kind["wire_bytes"] for kind in first["kinds"].values()),
        "bytes_a_step": {name: kind["bytes"] for name, kind in first["kinds"].items()},
        "kinds": first["kinds"],
    }


def count_step_flops(run: Run, counts: Counts) -> int:
    """Model FLOPs of one global batch."""
    return count_flops(
        run.config.model,
        tokens=counts.tokens,
        squared_lengths=counts.squared_lengths,
        masked=counts.masked,
    )


def write_profile(path: Path, cells: list[Measurement], traffic: Traffic) -> None:
    """Trace one more step of each model on rank 0; ranges carry the model's and the part's name."""
    with profile() as trace:
        trace.add_metadata("note", MARK)
        for cell in cells:
            with watch(cell.run, traffic) as stopwatch, record_function(cell.run.config.size):
                with stopwatch.span("other"):
                    take_step(cell.run)
    if cells[0].run.mesh.rank == 0:
        trace.export_chrome_trace(str(path))


def describe(cell: Measurement) -> dict:
    """The cell as the report has it."""
    config = cell.run.config
    mesh = cell.run.mesh
    return {
        "model": config.size,
        "parameters": sum(count_params(config.model).values()),
        "parameters_a_rank": count_parameters(cell.run),
        "precision": precision_of(config.deepspeed),
        "deepspeed_config": config.deepspeed_config,
        "zero": stage_of(config.deepspeed),
        "micro_batch_size": config.micro_batch_size,
        "accumulation": accumulation_of(config, mesh.dp_size),
        "sequence_length": config.stream.sequence_length,
        "activation_checkpointing": config.activation_checkpointing,
        "ranks": mesh.world_size,
        "tensor_parallel": mesh.tp_size,
        "process_memory": cell.process_memory,
        "flops_a_step": statistics.mean(turn["flops_a_step"] for turn in cell.rounds),
        **cell.on_cuda,
        "rounds": cell.rounds,
    }
