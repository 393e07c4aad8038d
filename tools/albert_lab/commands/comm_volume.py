"""Count the bytes that an optimizer step moves, by kind, and compare with the minimum.

They are counted from the shapes of the model, without training, for the settings of the files in
ds_configs/; tests compare them with what the engine moves (ZeRO adds a few bytes of padding to a
group). `--measure`, or a JSON with other settings, takes two steps on real ranks and counts every
byte at `torch.distributed`, norms, flags and counts (some kB) too. "On the wire" is what a rank
sends in a ring: 2 (n - 1) / n of the tensor for an all-reduce, (n - 1) / n for a gather, a scatter
or a reduction to one rank. "Hidden" is the share of a collective's time for which the step did not
wait. The minimum at ZeRO-0
is an all-reduce of the unique parameters' gradients; at ZeRO-1 a reduce-scatter in the gradients'
type and a gather in the weights' type; at ZeRO-2 one reduce-scatter per micro-batch, at ZeRO-3 one
gather too; of tensor parallelism two all-reduces per layer, forward and backward.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from albert_ds.base import cli
from albert_ds.base.cli import Parser, positive
from albert_ds.base.files import PACKAGE, write_report
from albert_ds.engine.deepspeed_config import precision_of, read_ds_config
from albert_ds.model.config import SIZES, reshape
from albert_ds.process.world import read_world
from albert_lab.bench_run import accumulation_of, bench_config, count_gpus, stage_of
from albert_lab.ranks import check_ranks, enter_world, start_ranks
from albert_lab.scaling.collectives import (
    ACTIVATIONS,
    GRADIENTS,
    SMALL,
    WEIGHTS,
    count_collectives,
    ring_bytes,
)
from albert_lab.scaling.layout import PRECISIONS, Layout
from albert_lab.tables import table
from albert_lab.traffic import Traffic, record_traffic

if TYPE_CHECKING:
    from albert_ds.settings.pretrain import RunConfig
    from albert_ds.training.pretrain import Run

# What --measure takes of a machine: rounded up from albert-large, albert-xlarge and bert-base.
RANK_BYTES = 5e8  # of a process
STATE_BYTES = 24  # of a parameter at ZeRO-0 in the update
START_SECONDS, SECONDS_A_PARAMETER, FLOPS = 15.0, 1e-7, 1e10


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    add = parser.add
    text = "sizes (default: albert-base)"
    add("--models", text, nargs="+", choices=SIZES, default=["albert-base"])
    text = "patterns of train.py --sharing to count, of each size (default: the size's own)"
    add("--sharing", text, "HOW", nargs="+", default=[None])
    add("--per-layer", "what layers have of their own", "WHAT", default="none")
    add("--measure", "take two steps on real ranks, with times", action="store_true")
    text = "ranks; --measure without a launcher starts them (default: one a GPU; 2 on a CPU)"
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
    args = build_parser().parse_args(argv)
    world = enter_world()
    is_alone = world.launcher == "none"
    ranks = (args.ranks or count_gpus() or 2) if is_alone else world.size
    configs = list_configs(args, ranks)
    others = sorted({c.deepspeed_config for c in configs if not is_counted(c.deepspeed)})
    if args.measure or others:
        if is_alone:
            check_ranks(ranks)
            announce(configs, ranks, "" if args.measure else f"{', '.join(others)}: other settings")
        if is_alone and ranks > 1:
            return start_ranks(ranks)
        reports = measure_configs(configs, record_traffic())
    else:
        reports = [count_step(config, ranks) for config in configs]
        if world.rank == 0:
            print("\n".join(as_table(report, reports) for report in reports))
    if args.output and world.rank == 0:
        write_report(args.output, {"reports": reports})
    return 0


def is_counted(ds_config: dict) -> bool:
    """Whether a JSON moves what a shipped one does, which `count_collectives` lists."""
    keys = ("zero_optimization", "bf16", "fp16", "data_types", "communication_data_type")
    files = [*Path(f"{PACKAGE}/ds_configs").glob("*_fp32.json")]
    files += Path(f"{PACKAGE}/ds_configs").glob("*_bf16.json")
    shipped = [read_ds_config(file) for file in files]
    return any(all(ds_config.get(k) == known.get(k) for k in keys) for known in shipped)


def announce(configs: list[RunConfig], ranks: int, why: str) -> None:
    """Say what the measured steps will take of this machine, before they take it."""
    layouts = [layout_of(config, ranks) for config in configs]
    needed = ranks * (RANK_BYTES + STATE_BYTES * max(x.parameters for x in layouts))
    seconds = START_SECONDS + sum(
        2 * layout.flops / FLOPS + layout.parameters * SECONDS_A_PARAMETER for layout in layouts
    )
    free = psutil.virtual_memory().available
    cli.log_line(
        f"{why and why + '; '}measured on {ranks} ranks: at most {needed / 1e9:.1f} GB here "
        f"({free / 1e9:.1f} are free), about {seconds / 60:.1f} minutes with a core a rank"
    )


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
        run = open_bench_run(config, mesh, device)
        reports.append(measure_step(run, traffic))
        run.engine.deepspeed.destroy()
        if mesh.rank == 0:
            print(as_table(reports[-1], reports), flush=True)
    leave_world(mesh)
    return reports


def measure_step(run: Run, traffic: Traffic) -> dict:
    """The traffic of a run's second step by kind; the first also sets things up. Collective."""
    from albert_lab.measurement import count_parameters, measure_round, take_step

    take_step(run)
    kinds = measure_round(run, 1, traffic)["kinds"]
    layout = layout_of(run.config, run.mesh.world_size)
    parameters = count_parameters(run)
    assert layout.parameters == parameters, (layout.parameters, parameters)
    return describe_step(run.config, layout, kinds)


def count_step(config: RunConfig, ranks: int) -> dict:
    """The traffic of a step by kind, from the shapes of the model alone."""
    layout = layout_of(config, ranks)
    kinds = {
        collective.kind: {
            "calls": collective.calls,
            "bytes": collective.bytes,
            "wire_bytes": collective.wire_bytes,
        }
        for collective in count_collectives(layout)
        if collective.kind != SMALL and collective.calls
    }
    return describe_step(config, layout, dict(sorted(kinds.items())))


def describe_step(config: RunConfig, layout: Layout, kinds: dict[str, dict]) -> dict:
    """A report of a step whose collectives were measured or counted."""
    minimum = count_minimum(config, layout)
    return {
        "model": config.size,
        "sharing": config.model.sharing,
        "per_layer": config.model.per_layer,
        "deepspeed_config": config.deepspeed_config,
        "ranks": layout.ranks,
        "tensor_parallel": layout.tensor_parallel,
        "accumulation": layout.accumulation,
        "parameters_a_rank": layout.parameters,
        "kinds": {
            kind: {**volume, "minimum_wire_bytes": minimum.get(kind)}
            for kind, volume in kinds.items()
        },
    }


def layout_of(config: RunConfig, ranks: int) -> Layout:
    return Layout(
        name=config.size,
        model=config.model,
        ranks=ranks,
        zero=stage_of(config.deepspeed),
        tensor_parallel=config.tensor_parallel,
        micro_batch_size=config.micro_batch_size,
        accumulation=accumulation_of(config, ranks // config.tensor_parallel),
        sequence_length=config.stream.sequence_length,
        precision=precision_of(config.deepspeed),
        activation_checkpointing=config.activation_checkpointing,
        muon=config.deepspeed["optimizer"]["type"] == "Muon",
    )


def count_minimum(config: RunConfig, layout: Layout) -> dict[str, float]:
    """Bytes that a rank must send per step in any implementation, by kind."""
    reduced_as = config.deepspeed.get("communication_data_type", layout.precision)
    passes = layout.accumulation

    def scattered(width: int) -> float:
        return ring_bytes(width * layout.parameters, layout.data_parallel, is_all_reduce=False)

    gradient = scattered(PRECISIONS[reduced_as])
    weight = scattered(layout.weight_bytes)
    minimum = {
        0: {GRADIENTS: 2 * gradient},
        1: {GRADIENTS: gradient, WEIGHTS: weight},
        2: {GRADIENTS: gradient * passes, WEIGHTS: weight},
        3: {GRADIENTS: gradient * passes, WEIGHTS: weight * passes},
    }[layout.zero]
    # Of activations the trainer sends no more than it must: what the scaling model counts.
    activations = (c for c in count_collectives(layout) if c.kind == ACTIVATIONS)
    return minimum | {collective.kind: collective.wire_bytes for collective in activations}


def as_table(report: dict, reports: list[dict]) -> str:
    """Lines for one of the reports; its bytes are compared with the first model's of that JSON."""
    first = next(r for r in reports if r["deepspeed_config"] == report["deepspeed_config"])
    rows = []
    wire = least = 0.0
    for kind, volume in report["kinds"].items():
        minimum = volume["minimum_wire_bytes"]
        wire += volume["wire_bytes"]
        least += minimum or 0.0
        row = [
            kind,
            f"{volume['calls']:g}",
            f"{volume['bytes'] / 1e6:.3f}",
            f"{volume['wire_bytes'] / 1e6:.3f}",
            f"{minimum / 1e6:.3f}" if minimum else "",
            f"{volume['wire_bytes'] / minimum:.3f}" if minimum else "",
        ]
        if "seconds" in volume:
            calls = [f"{number:g} {name}" for name, number in volume["collectives"].items()]
            row[1] = ", ".join(calls)
            hidden = 1 - min(1.0, volume["exposed_seconds"] / volume["seconds"])
            row += [f"{1e3 * volume['seconds']:.1f}", f"{hidden:.0%}"]
        rows.append(row)
    multiple = f"{wire / least:.3f}" if least else ""
    total = ["all", "", "", f"{wire / 1e6:.3f}", f"{least / 1e6:.3f}", multiple]
    header = ["kind", "collectives", "MB of tensors", "MB on the wire per rank", "minimum MB"]
    header.append("wire / minimum")
    if any("seconds" in volume for volume in report["kinds"].values()):
        header += ["ms", "hidden"]
    rows.append([*total, *[""] * (len(header) - len(total))])
    before = sum(volume["wire_bytes"] for volume in first["kinds"].values())
    compared = ""
    if wire and report["model"] != first["model"]:
        compared = f"\n{first['model']} sends {before / wire:.1f} times as much.\n"
    return (
        f"{report['model']}, --sharing {report['sharing']}, --per-layer {report['per_layer']}, "
        f"{Path(report['deepspeed_config']).name}: {report['ranks']} ranks, "
        f"tensor parallel {report['tensor_parallel']}, accumulation {report['accumulation']}, "
        f"{report['parameters_a_rank']:,} parameters per rank\n\n"
        f"{table(header, rows)}\n{compared}"
    )
