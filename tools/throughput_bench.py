#!/usr/bin/env python
"""Real train steps of several models, side by side in one run: samples/s, MFU, bytes moved.

Every model is built by the trainer's own `build` and stepped by its own `train_step`. The models
take turns, round by round (A B A B ...), so that a drift of the machine's speed cancels in the
ratios; each figure is the minimum, median and maximum over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from albert_ds.bench import bench_config, open_bench_run, start_ranks
from albert_ds.errors import ENDINGS
from albert_ds.flags import Parser, natural, positive
from albert_ds.model.arithmetic import count_flops, count_params
from albert_ds.model.config import SIZES
from albert_ds.parallel.mesh import build_mesh, check_tensor_parallel
from albert_ds.runtime.ending import say
from albert_ds.runtime.launch import join_world, read_world
from albert_ds.runtime.traffic import record_traffic


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/throughput_bench.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, required=True, help="the first is the yardstick")
    add("--ranks", type=positive, default=2, help="processes to start where no launcher has")
    add("--tensor-parallel", type=positive, default=1, help="ranks a block is cut over")
    add("--micro-batch-size", type=positive, default=4, help="samples a pass")
    add("--accumulation", type=positive, default=1, help="passes an optimizer step")
    add("--sequence-length", type=positive, default=512, help="tokens of a synthetic row, all real")
    add("--data", nargs="+", help="built folders: real sequences instead of synthetic rows")
    add("--dropout", type=float, help="probability (default: the size's)")
    add("--vocab-size", type=positive, default=30_000, help="pieces, without --data")
    add("--deepspeed_config", default="ds_configs/zero1_fp32.json", help="DeepSpeed's JSON")
    add("--activation-checkpointing", choices=("none", "attention", "block"), default="none")
    add("--warmup", type=natural, default=1, help="steps not counted, each model")
    add("--steps", type=positive, default=1, help="steps a round, each model")
    add("--rounds", type=positive, default=5, help="turns of each model")
    add("--output", type=Path, help="JSON with every raw number")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    world = read_world()
    if world.launcher == "none" and args.ranks > 1:
        return start_ranks(argv, args.ranks)
    for name in args.models:
        size = SIZES[name]
        check_tensor_parallel(
            args.tensor_parallel,
            world_size=world.size,
            num_heads=size.num_heads,
            ffn_size=size.ffn_size,
        )
    traffic = record_traffic()
    device = join_world(world)
    mesh = build_mesh(args.tensor_parallel)
    report = measure(args, mesh, device, traffic)
    if mesh.rank == 0:
        print(as_table(report))
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(args, mesh, device, traffic) -> dict:
    """Build every model, then time them in turn."""
    from albert_ds.runtime.metrics import peak_flops
    from albert_ds.runtime.versions import read_versions

    runs = []
    for name in args.models:
        size = replace(SIZES[name], vocab_size=args.vocab_size)
        if args.dropout is not None:
            size = replace(size, dropout=args.dropout)
        config = bench_config(
            name,
            size,
            deepspeed_config=args.deepspeed_config,
            micro_batch_size=args.micro_batch_size,
            sequence_length=args.sequence_length,
            data_parallel=mesh.dp_size,
            tensor_parallel=args.tensor_parallel,
            accumulation=args.accumulation,
            activation_checkpointing=args.activation_checkpointing,
            data=args.data,
        )
        runs.append(open_bench_run(config, mesh, device, traffic))
    rows: dict[str, list[dict]] = {name: [] for name in args.models}
    for run in runs:
        if args.warmup:
            time_steps(run, args.warmup, traffic)
    for _ in range(args.rounds):
        for run in runs:
            rows[run.config.size].append(time_steps(run, args.steps, traffic))
    return {
        "device": device_name(device),
        "ranks": mesh.world_size,
        "tensor_parallel": mesh.tp_size,
        "peak_flops": peak_flops(device),
        "settings": {k: str(v) for k, v in vars(args).items()},
        "versions": read_versions(),
        "models": {
            name: {"parameters": sum(count_params(run.config.model).values()), "rounds": rows[name]}
            for name, run in zip(args.models, runs, strict=True)
        },
    }


def time_steps(run, steps: int, traffic) -> dict:
    """Do `steps` optimizer steps; what they took and moved, a step."""
    import torch

    from albert_ds.train import next_batch, train_step

    on_gpu = run.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, started, flops, tokens, waited = traffic.copy(), time.perf_counter(), 0, 0, 0.0
    for _ in range(steps):
        batch = next_batch(run)
        train_step(run, batch)
        counts = batch.counts
        waited += batch.data_seconds
        tokens += counts.tokens
        flops += count_flops(
            run.config.model,
            tokens=counts.tokens,
            squared_lengths=counts.squared_lengths,
            masked=counts.masked,
        )
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    moved = traffic - before
    return {
        "seconds_a_step": seconds / steps,
        "samples_a_second": run.config.batch_size * steps / seconds,
        "tokens_a_second": tokens / seconds,
        "flops_a_second": flops / seconds,
        "data_wait_fraction": waited / seconds,
        "peak_memory": torch.cuda.max_memory_allocated() if on_gpu else None,
        "calls_a_step": {k: v / steps for k, v in moved.calls.items()},
        "bytes_a_step": {k: v / steps for k, v in moved.bytes.items()},
    }


def device_name(device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads a rank"


def as_table(report: dict) -> str:
    """The report for a person: one line a model, the first is the yardstick."""
    first = next(iter(report["models"].values()))["rounds"]
    lines = [
        f"{report['device']}, {report['ranks']} ranks, tensor parallel "
        f"{report['tensor_parallel']}; median (min .. max) over rounds",
        "| model | parameters | samples/s | tokens/s | TFLOP/s a rank | MFU | speed-up | "
        "MB moved a step | collectives a step | data wait | peak GB |",
        "| --- " * 11 + "|",
    ]
    for name, model in report["models"].items():
        rounds = model["rounds"]
        ratios = [
            own["samples_a_second"] / yardstick["samples_a_second"]
            for own, yardstick in zip(rounds, first, strict=True)
        ]
        tflops = [r["flops_a_second"] / report["ranks"] / 1e12 for r in rounds]
        peak = report["peak_flops"]
        mfu = f"{statistics.median(tflops) * 1e12 / peak:.1%}" if peak else "-"
        memory = rounds[-1]["peak_memory"]
        moved, calls = rounds[-1]["bytes_a_step"], rounds[-1]["calls_a_step"]
        kinds = ", ".join(
            f"{count:g} {kind} {moved[kind] / 1e6:.2f} MB" for kind, count in calls.items()
        )
        lines.append(
            f"| {name} | {model['parameters']:,} | "
            f"{spread([r['samples_a_second'] for r in rounds])} | "
            f"{spread([r['tokens_a_second'] for r in rounds])} | {spread(tflops)} | {mfu} | "
            f"{spread(ratios)} | {sum(moved.values()) / 1e6:.2f} | {kinds} | "
            f"{max(r['data_wait_fraction'] for r in rounds):.1%} | "
            f"{memory / 1e9 if memory else float('nan'):.1f} |"
        )
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.3g} ({min(values):,.3g} .. {max(values):,.3g})"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
