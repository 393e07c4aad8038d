"""Count every byte that an optimizer step moves, by kind, and compare with the minimum.

The bytes are counted in the trainer's own step, at `torch.distributed`, which DeepSpeed,
megatron-core and the trainer all call. "On the wire" is what a rank sends in a ring: 2 (n - 1) / n
of the tensor for an all-reduce, (n - 1) / n for a gather, a scatter or a reduction to one rank.
"Hidden" is the share of a collective's time for which the step did not wait. The minimum at ZeRO-0
is an all-reduce of the unique parameters' gradients; at ZeRO-1 a reduce-scatter in the gradients'
type and a gather in the weights' type; at ZeRO-2 one reduce-scatter per micro-batch, at ZeRO-3 one
gather too; of tensor parallelism two all-reduces per layer, forward and backward.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds import cli
from albert_ds.cli import Parser, positive
from albert_ds.engine.deepspeed_config import precision_of
from albert_ds.files import PACKAGE, write_report
from albert_ds.model.config import SIZES, reshape
from albert_ds.process.world import read_world
from albert_ds.report.traffic import Traffic, record_traffic
from albert_lab.bench_run import accumulation_of, bench_config, count_gpus, stage_of
from albert_lab.ranks import enter_world, start_ranks
from albert_lab.scaling.collectives import (
    ACTIVATIONS,
    GRADIENTS,
    WEIGHTS,
    count_collectives,
    ring_bytes,
)
from albert_lab.scaling.layout import PRECISIONS, Layout
from albert_lab.tables import table

if TYPE_CHECKING:
    from albert_ds.parallel.mesh import Mesh
    from albert_ds.pretraining.loop import Run
    from albert_ds.settings.pretrain import RunConfig


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    add = parser.add
    text = "sizes (default: albert-base)"
    add("--models", text, nargs="+", choices=SIZES, default=["albert-base"])
    text = "patterns of train.py --sharing to count, of each size (default: the size's own)"
    add("--sharing", text, "HOW", nargs="+", default=[None])
    add("--per-layer", "what layers have of their own", "WHAT", default="none")
    text = "processes to start without a launcher (default: one for each GPU; 2 on a CPU)"
    add("--ranks", text, "RANKS", positive)
    add("--tensor-parallel", "ranks that share a block", "RANKS", positive, default=1)
    text = "DeepSpeed's JSON files (default: zero0_fp32.json and zero1_bf16.json of ds_configs/)"
    add(
        "--deepspeed_config",
        text,
        "FILE",
        cli.path,
        nargs="+",
        default=[f"{PACKAGE}/ds_configs/{name}.json" for name in ("zero0_fp32", "zero1_bf16")],
    )
    add("--micro-batch-size", "sequences per micro-batch", "SAMPLES", positive, default=1)
    add("--accumulation", "micro-batches per optimizer step", "PASSES", positive, default=2)
    add("--sequence-length", "tokens of a synthetic row", "TOKENS", positive, default=32)
    add("--output", "JSON with every figure", "FILE", cli.new_file)
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    args, world = build_parser().parse_args(argv), enter_world()
    is_alone = world.launcher == "none"
    ranks = (args.ranks or count_gpus() or 2) if is_alone else world.size
    configs = list_configs(args, ranks)
    if is_alone and ranks > 1:
        return start_ranks(ranks)
    reports = measure_configs(configs, record_traffic())
    if args.output and world.rank == 0:
        write_report(args.output, {"reports": reports})
    return 0


def list_configs(args, ranks: int) -> list[RunConfig]:
    """A run for every model, pattern and configuration. Raises UserError."""
    changes = {"dropout": 0.0, "per_layer": args.per_layer}
    return [
        bench_config(
            name,
            reshape(SIZES[name], **changes, sharing=sharing or SIZES[name].sharing),
            deepspeed_config=file,
            micro_batch_size=args.micro_batch_size,
            sequence_length=args.sequence_length,
            ranks=ranks,
            tensor_parallel=args.tensor_parallel,
            accumulation=args.accumulation,
        )
        for name, sharing, file in itertools.product(
            args.models, args.sharing, args.deepspeed_config
        )
    ]


def measure_configs(configs: list[RunConfig], traffic: Traffic) -> list[dict]:
    """A report for each, printed by rank 0. Collective."""
    from albert_ds.parallel.mesh import build_mesh
    from albert_ds.process.rendezvous import join_world
    from albert_lab.measurement import leave_world, open_bench_run

    tensor_parallel = configs[0].tensor_parallel
    device = join_world(read_world(), tensor_parallel=tensor_parallel)
    mesh = build_mesh(tensor_parallel)
    reports = []
    for config in configs:
        if mesh.rank == 0:
            what = f"{config.size}, sharing {config.model.sharing}, {config.deepspeed_config}"
            cli.log_line(f"{what}: two steps")
        run = open_bench_run(config, mesh, device, traffic)
        reports.append(measure_step(run, traffic))
        run.engine.deepspeed.destroy()
        if mesh.rank == 0:
            print(as_table(reports[-1]), flush=True)
    leave_world(mesh)
    return reports


def measure_step(run: Run, traffic: Traffic) -> dict:
    """The traffic of a run's second step by kind; the first also sets things up. Collective."""
    from albert_lab.measurement import count_parameters, measure_round, take_step

    take_step(run)
    kinds = measure_round(run, 1, traffic)["kinds"]
    parameters = count_parameters(run)
    minimum = count_minimum(run.config, run.mesh, parameters)
    return {
        "model": run.config.size,
        "sharing": run.config.model.sharing,
        "per_layer": run.config.model.per_layer,
        "deepspeed_config": run.config.deepspeed_config,
        "ranks": run.mesh.world_size,
        "tensor_parallel": run.mesh.tp_size,
        "accumulation": accumulation_of(run.config, run.mesh.dp_size),
        "parameters_a_rank": parameters,
        "kinds": {
            kind: {**found, "minimum_wire_bytes": minimum.get(kind)}
            for kind, found in kinds.items()
        },
    }


def count_minimum(config: RunConfig, mesh: Mesh, parameters: int) -> dict[str, float]:
    """Bytes that a rank must send per step in any implementation, by kind."""
    ds_config, model = config.deepspeed, config.model
    precision = precision_of(ds_config)
    reduced_as = ds_config.get("communication_data_type", precision)
    passes = accumulation_of(config, mesh.dp_size)

    def scattered(width: int) -> float:
        return ring_bytes(width * parameters, mesh.dp_size, is_all_reduce=False)

    gradient, weight = scattered(PRECISIONS[reduced_as]), scattered(PRECISIONS[precision])
    minimum = {
        0: {GRADIENTS: 2 * gradient},
        1: {GRADIENTS: gradient, WEIGHTS: weight},
        2: {GRADIENTS: gradient * passes, WEIGHTS: weight},
        3: {GRADIENTS: gradient * passes, WEIGHTS: weight * passes},
    }[stage_of(ds_config)]
    if mesh.tp_size > 1:  # the trainer sends no more than it must: what the scaling model counts
        layout = Layout(
            name=config.size,
            model=model,
            ranks=mesh.world_size,
            tensor_parallel=mesh.tp_size,
            micro_batch_size=config.micro_batch_size,
            accumulation=passes,
            sequence_length=config.stream.sequence_length,
            precision=precision,
        )
        (activations,) = (c for c in count_collectives(layout) if c.kind == ACTIVATIONS)
        minimum[ACTIVATIONS] = activations.wire_bytes
    return minimum


def as_table(report: dict) -> str:
    rows = []
    wire = least = 0.0
    for kind, found in report["kinds"].items():
        minimum = found["minimum_wire_bytes"]
        wire, least = wire + found["wire_bytes"], least + (minimum or 0.0)
        hidden = 1 - min(1.0, found["exposed_seconds"] / found["seconds"])
        rows.append(
            [
                kind,
                ", ".join(f"{number:g} {name}" for name, number in found["collectives"].items()),
                f"{found['bytes'] / 1e6:.3f}",
                f"{found['wire_bytes'] / 1e6:.3f}",
                f"{minimum / 1e6:.3f}" if minimum else "",
                f"{found['wire_bytes'] / minimum:.3f}" if minimum else "",
                f"{1e3 * found['seconds']:.1f}",
                f"{hidden:.0%}",
            ]
        )
    multiple = f"{wire / least:.3f}" if least else ""
    rows.append(["all", "", "", f"{wire / 1e6:.3f}", f"{least / 1e6:.3f}", multiple, "", ""])
    header = ("kind", "collectives", "MB of tensors", "MB on the wire per rank", "minimum MB")
    return (
        f"{report['model']}, --sharing {report['sharing']}, --per-layer {report['per_layer']}, "
        f"{Path(report['deepspeed_config']).name}: {report['ranks']} ranks, "
        f"tensor parallel {report['tensor_parallel']}, accumulation {report['accumulation']}, "
        f"{report['parameters_a_rank']:,} parameters per rank\n\n"
        f"{table((*header, 'wire / minimum', 'ms', 'hidden'), rows)}\n"
    )
