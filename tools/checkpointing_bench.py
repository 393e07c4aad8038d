#!/usr/bin/env python
"""What activation checkpointing costs and saves: step time and peak memory of each mode.

Each mode is a process of its own, so that its peak is its own; they take turns, step by step
(A B C A B C ...), so that a drift of the machine's speed cancels. The steps are the trainer's own
`build` and `train_step` on full rows of random tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from albert_ds.bench import bench_config, open_bench_run
from albert_ds.config import RunConfig
from albert_ds.errors import UserError
from albert_ds.flags import Parser
from albert_ds.model.config import SIZES
from albert_ds.runtime.ending import say

MODES = ("none", "attention", "block")


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/checkpointing_bench.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", choices=SIZES, default="albert-base", help="size")
    add("--num-layers", type=int, help="instead of the size's")
    add("--micro-batch-size", type=int, default=4, help="samples of a step")
    add("--sequence-length", type=int, default=512, help="tokens of a row, all real")
    add("--deepspeed_config", default="ds_configs/zero0_fp32.json", help="DeepSpeed's JSON")
    add("--rounds", type=int, default=5, help="steps of each mode, after one that is not counted")
    add("--output", type=Path, help="JSON with every raw number")
    return parser


def main(argv: list[str]) -> int:
    try:
        args = build_parser().parse_args(argv)
        model = SIZES[args.model]
        if args.num_layers:
            model = replace(model, num_layers=args.num_layers)
        configs = {
            mode: bench_config(
                args.model,
                model,
                deepspeed_config=args.deepspeed_config,
                micro_batch_size=args.micro_batch_size,
                sequence_length=args.sequence_length,
                activation_checkpointing=mode,
            )
            for mode in MODES
        }
    except UserError as error:
        say(str(error))
        return error.code
    report = measure(configs, args.rounds)
    print(as_table(report))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(configs: dict[str, RunConfig], rounds: int) -> dict[str, dict]:
    """Seconds of every step and the peak memory beyond model and optimizer, by mode."""
    context = mp.get_context("spawn")
    pipes, processes = {}, []
    for mode, config in configs.items():
        pipes[mode], theirs = context.Pipe()
        processes.append(context.Process(target=serve_steps, args=(config, theirs)))
        processes[-1].start()
        theirs.close()
    seconds: dict[str, list[float]] = {mode: [] for mode in configs}
    for _ in range(1 + rounds):
        for mode, pipe in pipes.items():
            pipe.send("step")
            seconds[mode].append(pipe.recv())
    report = {}
    for mode, pipe in pipes.items():
        pipe.send("end")
        report[mode] = {"step_seconds": seconds[mode][1:], **pipe.recv()}
    for process in processes:
        process.join()
    return report


def serve_steps(config: RunConfig, pipe) -> None:
    """One mode in this process: a step whenever asked, at the end what it took."""
    from albert_ds.parallel.mesh import build_mesh
    from albert_ds.runtime.launch import join_world, read_world
    from albert_ds.runtime.traffic import record_traffic
    from albert_ds.train import next_batch, train_step

    traffic = record_traffic()
    device = join_world(read_world({}))
    run = open_bench_run(config, build_mesh(1), device, traffic)
    before = read_memory(device)
    while pipe.recv() == "step":
        batch, started = next_batch(run), time.perf_counter()
        train_step(run, batch)
        float(run.window.outputs.sum())  # waits for the device
        pipe.send(time.perf_counter() - started)
    pipe.send({"peak_bytes": read_memory(device, peak=True) - before, "device": str(device)})


def read_memory(device, *, peak: bool = False) -> int:
    """Bytes held now, or at the most so far: by tensors on CUDA, else by the process."""
    import torch

    if device.type == "cuda":
        ask = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return ask(device)
    import psutil

    if peak:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return psutil.Process().memory_info().rss


def as_table(report: dict[str, dict]) -> str:
    """Markdown: peak memory, and minimum, median and maximum of the step's seconds."""
    lines = [
        "| checkpointing | peak memory beyond model and optimizer | step, seconds (min / median / "
        "max) | median against none |",
        "| --- | --: | --: | --: |",
    ]
    base = statistics.median(report["none"]["step_seconds"])
    for mode, values in report.items():
        steps = values["step_seconds"]
        middle = statistics.median(steps)
        times = f"{min(steps):.2f} / {middle:.2f} / {max(steps):.2f}"
        lines.append(
            f"| {mode} | {values['peak_bytes'] / 2**20:,.0f} MiB | {times} | {middle / base:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
