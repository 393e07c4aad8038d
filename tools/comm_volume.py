#!/usr/bin/env python
"""Every byte that an optimizer step moves, by kind, beside the least that it could be.

Counted on the trainer's own engine and step, at `torch.distributed`, where DeepSpeed, megatron-core
and the trainer all pass. On the wire means what a rank sends in a ring: of an all-reduce
2 (n - 1) / n of the tensor, of a gather, a scatter or a reduction to one rank (n - 1) / n. The
minimum at ZeRO-0 is an all-reduce of the unique parameters' gradients; at ZeRO 1 and 2 a
reduce-scatter in the gradient's type and a gather in the weights'; at ZeRO-3 one gather and one
reduce-scatter a micro-batch; of tensor parallelism two all-reduces a layer, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.bench import bench_config, open_bench_run, start_ranks
from albert_ds.errors import ENDINGS
from albert_ds.flags import Parser, positive
from albert_ds.model.config import SIZES
from albert_ds.parallel.mesh import build_mesh, check_tensor_parallel
from albert_ds.runtime.ending import say
from albert_ds.runtime.launch import join_world, read_world
from albert_ds.runtime.traffic import Event, Traffic, record_traffic

if TYPE_CHECKING:
    from albert_ds.config import RunConfig
    from albert_ds.parallel.mesh import Mesh
    from albert_ds.train import Run

GRADIENTS, WEIGHTS = "gradients", "weights"
ACTIVATIONS, SMALL = "tensor-parallel activations", "norms, flags and counts"
SMALL_BYTES = 1 << 13  # LAMB's two sums for each of a 24-layer BERT's matrices are 5 kB
SCALAR_BYTES = 64  # a norm or a flag over tensor-parallel peers
HALF_TYPES = ("bf16", "fp16")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tools/comm_volume.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, default=["albert-base"], help="(albert-base)")
    add("--ranks", type=positive, default=2, help="processes to start where no launcher has (2)")
    add("--tensor-parallel", type=positive, default=1, help="ranks a block is cut over (1)")
    add(
        "--deepspeed_config",
        nargs="+",
        default=["ds_configs/zero0_fp32.json", "ds_configs/zero1_bf16.json"],
        metavar="FILE",
        help="DeepSpeed's JSON, one or several (zero0_fp32 and zero1_bf16)",
    )
    add("--micro-batch-size", type=positive, default=1, help="samples a pass (1)")
    add("--accumulation", type=positive, default=2, help="passes an optimizer step (2)")
    add("--sequence-length", type=positive, default=32, help="tokens of a row (32)")
    add("--output", type=Path, help="JSON with every figure")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    world = read_world()
    if world.launcher == "none" and args.ranks > 1:
        return start_ranks(argv, args.ranks)
    for name in args.models:
        check_tensor_parallel(
            args.tensor_parallel,
            world_size=world.size,
            num_heads=SIZES[name].num_heads,
            ffn_size=SIZES[name].ffn_size,
        )
    traffic = record_traffic()
    device = join_world(world)
    mesh = build_mesh(args.tensor_parallel)
    reports = []
    for name in args.models:
        for file in args.deepspeed_config:
            config = bench_config(
                name,
                replace(SIZES[name], dropout=0.0),
                deepspeed_config=file,
                micro_batch_size=args.micro_batch_size,
                sequence_length=args.sequence_length,
                data_parallel=mesh.dp_size,
                tensor_parallel=args.tensor_parallel,
                accumulation=args.accumulation,
            )
            run = open_bench_run(config, mesh, device, traffic)
            reports.append(measure_step(run, traffic))
            run.engine.deepspeed.destroy()
            if mesh.rank == 0:
                print(as_table(reports[-1]), flush=True)
    if mesh.rank == 0 and args.output:
        args.output.write_text(json.dumps(reports, indent=1) + "\n")
    return 0


@dataclass(kw_only=True, slots=True)
class Volume:
    """What one kind of collective came to in a step."""

    calls: int = 0
    bytes: int = 0  # of the full tensors
    wire: float = 0.0  # bytes that a rank sends
    seconds: float = 0.0  # the host was in the calls: with gloo all of it, none is hidden
    by: Counter[str] = field(default_factory=Counter)  # calls by collective


def measure_step(run: Run, traffic: Traffic) -> dict:
    """The second step's traffic by kind: the first one also sets things up. Collective."""
    from albert_ds.train import next_batch, train_step

    train_step(run, next_batch(run))
    traffic.events = []
    train_step(run, next_batch(run))
    events, traffic.events = traffic.events, None
    volumes: dict[str, Volume] = {}
    for event in events:
        size = group_size(event, run.mesh)
        if size == 1:
            continue  # moves nothing
        volume = volumes.setdefault(kind_of(event, run.mesh), Volume())
        volume.calls += 1
        volume.bytes += event.bytes
        turns = 2 if event.collective == "all_reduce" else 1
        volume.wire += turns * event.bytes * (size - 1) / size
        volume.seconds += event.seconds
        volume.by[event.collective] += 1
    parameters = count_parameters(run)
    minimum = count_minimum(run.config, run.mesh, parameters)
    return {
        "model": run.config.size,
        "deepspeed_config": run.config.deepspeed_config,
        "ranks": run.mesh.world_size,
        "tensor_parallel": run.mesh.tp_size,
        "accumulation": run.config.batch_size // (run.config.micro_batch_size * run.mesh.dp_size),
        "parameters_a_rank": parameters,
        "kinds": {
            kind: {
                "calls": volume.calls,
                "collectives": dict(volume.by),
                "bytes": volume.bytes,
                "wire_bytes": volume.wire,
                "minimum_wire_bytes": minimum.get(kind),
                "host_seconds": volume.seconds,
            }
            for kind, volume in sorted(volumes.items())
        },
    }


def kind_of(event: Event, mesh: Mesh) -> str:
    if mesh.tp_size > 1 and event.group is mesh.tp_group and event.bytes > SCALAR_BYTES:
        return ACTIVATIONS
    if event.bytes <= SMALL_BYTES:
        return SMALL
    return WEIGHTS if event.collective.startswith("all_gather") else GRADIENTS


def group_size(event: Event, mesh: Mesh) -> int:
    import torch.distributed as dist

    return mesh.world_size if event.group is None else dist.get_world_size(event.group)


def count_parameters(run: Run) -> int:
    """Unique parameters of a rank's part of the model, before ZeRO divides them."""
    engine = run.engine
    return sum(
        shape.numel() // (1 if engine.shard_dims[name] is None else run.mesh.tp_size)
        for name, shape in engine.shapes.items()
    )


def count_minimum(config: RunConfig, mesh: Mesh, parameters: int) -> dict[str, float]:
    """Bytes that a rank must send a step, by kind, whoever writes the program."""
    ds_config, model = config.deepspeed, config.model
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    is_half = any(ds_config.get(name, {}).get("enabled") for name in HALF_TYPES)
    reduced_as = ds_config.get("communication_data_type", "fp32")
    share = (mesh.dp_size - 1) / mesh.dp_size
    passes = config.batch_size // (config.micro_batch_size * mesh.dp_size)
    gradient = share * parameters * (2 if reduced_as in HALF_TYPES else 4)
    weight = share * parameters * (2 if is_half else 4)
    minimum = {
        0: {GRADIENTS: 2 * gradient},
        1: {GRADIENTS: gradient, WEIGHTS: weight},
        2: {GRADIENTS: gradient * passes, WEIGHTS: weight},
        3: {GRADIENTS: gradient * passes, WEIGHTS: weight * passes},
    }[stage]
    if mesh.tp_size > 1:
        rows = config.micro_batch_size * config.stream.sequence_length * passes
        layers = 2 * 2 * model.num_layers * rows * model.hidden_size * (2 if is_half else 4)
        minimum[ACTIVATIONS] = layers * 2 * (mesh.tp_size - 1) / mesh.tp_size
    return minimum


def as_table(report: dict) -> str:
    lines = [
        f"{report['model']}, {Path(report['deepspeed_config']).name}: {report['ranks']} ranks, "
        f"tensor parallel {report['tensor_parallel']}, accumulation {report['accumulation']}, "
        f"{report['parameters_a_rank']:,} parameters a rank",
        "",
        "| kind | collectives | MB, whole tensors | MB on the wire a rank | minimum | multiple "
        "| host ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    wire = least = 0.0
    for kind, found in report["kinds"].items():
        minimum = found["minimum_wire_bytes"]
        wire, least = wire + found["wire_bytes"], least + (minimum or 0.0)
        by = ", ".join(f"{number} {name}" for name, number in found["collectives"].items())
        lines.append(
            f"| {kind} | {by} | {found['bytes'] / 1e6:.3f} | {found['wire_bytes'] / 1e6:.3f} | "
            + (f"{minimum / 1e6:.3f} | {found['wire_bytes'] / minimum:.3f}" if minimum else " | ")
            + f" | {1e3 * found['host_seconds']:.1f} |"
        )
    multiple = f"{wire / least:.3f}" if least else ""
    lines += [f"| all | | | {wire / 1e6:.3f} | {least / 1e6:.3f} | {multiple} | |", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
