#!/usr/bin/env python
"""Every byte that an optimizer step moves, by kind, beside the least that it could be.

Counted on the trainer's own engine and step, at `torch.distributed`, where DeepSpeed, megatron-core
and the trainer all pass. On the wire means what a rank sends in a ring: of an all-reduce
2 (n - 1) / n of the tensor, of a gather, a scatter or a reduction to one rank (n - 1) / n. Hidden
is the part of a collective's time that the step did not wait for. The minimum at ZeRO-0 is an
all-reduce of the unique parameters' gradients; at ZeRO 1 and 2 a reduce-scatter in the gradient's
type and a gather in the weights'; at ZeRO-3 one gather and one reduce-scatter a micro-batch; of
tensor parallelism two all-reduces a layer, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.bench import bench_config, open_bench_run, precision_of, stage_of
from albert_ds.errors import ENDINGS
from albert_ds.flags import Parser, positive
from albert_ds.measure.cells import count_parameters
from albert_ds.measure.ranks import start_ranks
from albert_ds.model.config import SIZES
from albert_ds.parallel.mesh import build_mesh, check_tensor_parallel
from albert_ds.runtime.ending import say
from albert_ds.runtime.launch import join_world, leave_world, read_world
from albert_ds.runtime.traffic import Traffic, record_traffic
from albert_ds.runtime.volume import ACTIVATIONS, GRADIENTS, WEIGHTS

if TYPE_CHECKING:
    from albert_ds.config import RunConfig
    from albert_ds.parallel.mesh import Mesh
    from albert_ds.train import Run

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
    leave_world(mesh, together=True)
    return 0


def measure_step(run: Run, traffic: Traffic) -> dict:
    """The second step's traffic by kind: the first one also sets things up. Collective."""
    import torch

    from albert_ds.measure.split import watch
    from albert_ds.runtime.volume import sum_up
    from albert_ds.train import next_batch, train_step

    train_step(run, next_batch(run))
    with watch(run, traffic) as stopwatch:
        train_step(run, next_batch(run))
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    volumes = sum_up(traffic.events, run.mesh, stopwatch.clock)
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
                "seconds": volume.seconds,
                "exposed_seconds": volume.exposed_seconds,
            }
            for kind, volume in volumes.items()
        },
    }


def count_minimum(config: RunConfig, mesh: Mesh, parameters: int) -> dict[str, float]:
    """Bytes that a rank must send a step, by kind, whoever writes the program."""
    ds_config, model = config.deepspeed, config.model
    is_half = precision_of(ds_config) != "fp32"
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
    }[stage_of(ds_config)]
    if mesh.tp_size > 1:
        length = config.stream.sequence_length
        read = 1 + max(1, round(config.stream.masked_fraction * length))  # of the last layer
        # Two all-reduces a layer forward, two backward; three of the last layer's are of what is
        # read alone.
        rows = config.micro_batch_size * ((4 * model.num_layers - 3) * length + 3 * read)
        layers = passes * rows * model.hidden_size * (2 if is_half else 4)
        minimum[ACTIVATIONS] = layers * 2 * (mesh.tp_size - 1) / mesh.tp_size
    return minimum


def as_table(report: dict) -> str:
    lines = [
        f"{report['model']}, {Path(report['deepspeed_config']).name}: {report['ranks']} ranks, "
        f"tensor parallel {report['tensor_parallel']}, accumulation {report['accumulation']}, "
        f"{report['parameters_a_rank']:,} parameters a rank",
        "",
        "| kind | collectives | MB, whole tensors | MB on the wire a rank | minimum | multiple "
        "| ms | of them hidden |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    wire = least = 0.0
    for kind, found in report["kinds"].items():
        minimum = found["minimum_wire_bytes"]
        wire, least = wire + found["wire_bytes"], least + (minimum or 0.0)
        by = ", ".join(f"{number} {name}" for name, number in found["collectives"].items())
        lines.append(
            f"| {kind} | {by} | {found['bytes'] / 1e6:.3f} | {found['wire_bytes'] / 1e6:.3f} | "
            + (f"{minimum / 1e6:.3f} | {found['wire_bytes'] / minimum:.3f}" if minimum else " | ")
            + f" | {1e3 * found['seconds']:.1f} | "
            f"{1 - min(1.0, found['exposed_seconds'] / found['seconds']):.0%} |"
        )
    multiple = f"{wire / least:.3f}" if least else ""
    lines += [f"| all | | | {wire / 1e6:.3f} | {least / 1e6:.3f} | {multiple} | | |", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
