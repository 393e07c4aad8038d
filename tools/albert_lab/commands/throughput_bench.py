"""Measure training steps of several models in one run: speed, memory, and where the time goes.

Every step is the trainer's own. The models of a layout take turns, round by round (A B A B ...),
so a drift of the machine's speed cancels in the ratios. Each figure is the median, minimum and
maximum over the rounds. Lists (--ranks 1,2,4) are swept: every combination is measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from albert_ds.base import cli
from albert_ds.base.cli import Parser, Range, integer, log_line, non_negative, positive
from albert_ds.base.errors import UserError
from albert_ds.base.files import PACKAGE, write_report
from albert_ds.base.json_files import read_json
from albert_ds.model.config import SIZES
from albert_ds.process.world import World
from albert_ds.settings.pretrain import RunConfig
from albert_ds.vocab.vocab import NUM_FIXED
from albert_lab.bench_run import bench_config, count_gpus
from albert_lab.ranks import enter_world, start_ranks
from albert_lab.scaling.layout import CHECKPOINTING
from albert_lab.throughput_tables import as_tables
from albert_lab.traffic import record_traffic


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    _add_layouts(parser.add)
    _add_timing(parser.add)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def _add_layouts(add) -> None:
    """What is measured."""
    add("--models", "sizes; the first is the baseline", nargs="+", choices=SIZES, required=True)
    text = "processes to start without a launcher (default: one for each GPU; 2 on a CPU)"
    add("--ranks", text, "RANKS", several(positive))
    add("--tensor-parallel", "ranks that share a block", "RANKS", several(positive), default="1")
    text = "sequences per micro-batch (default: 32 on a GPU, 4 on a CPU)"
    add("--micro-batch", text, type=several(positive))
    add("--accumulation", "micro-batches per optimizer step", "PASSES", positive, default=1)
    add("--sequence-length", "tokens of a synthetic row", "TOKENS", positive, default=512)
    text = "folders of `albert-ds shards` (default: synthetic rows)"
    add("--data", text, type=cli.path, nargs="+")
    add("--dropout", "probability (default: the size's)", "P", Range(ge=0, lt=1))
    pieces = integer(NUM_FIXED + 1, 1 << 20)
    add("--vocab-size", "pieces, without --data", "PIECES", pieces, default=30_000)
    text = "DeepSpeed's JSON files (default: of ds_configs/ zero1_bf16.json on a GPU, "
    text += "zero1_fp32.json on a CPU)"
    add("--deepspeed_config", text, "FILE", cli.path, nargs="+")
    text = "none, attention or block: what backward recomputes"
    add("--activation-checkpointing", text, "MODE", several(checkpointing_mode), default="none")


def _add_timing(add) -> None:
    """How, and what is written."""
    add("--warmup", "steps of each model that are not counted", "STEPS", non_negative, default=1)
    text = "steps of each model per round (default: 5 on a GPU, 1 on a CPU)"
    add("--steps", text, "STEPS", positive)
    add("--rounds", "rounds; each model takes part in each", "ROUNDS", positive, default=5)
    text = "of a rank's device, for MFU (default: of known GPUs)"
    add("--peak-tflops", text, "TFLOPS", Range(gt=0))
    add("--profile", "trace of one step each, for ui.perfetto.dev", "FILE", cli.new_file)
    add("--output", "JSON with every raw number", "FILE", cli.new_file)


def several(one: Callable) -> Callable[[str], list]:
    """A comma-separated list."""
    return lambda text: [one(word) for word in text.split(",")]


def checkpointing_mode(text: str) -> str:
    if text not in CHECKPOINTING:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: {', '.join(CHECKPOINTING)}")
    return text


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    world = enter_world()
    fill_defaults(args, world)
    layouts = choose_layouts(args, world)
    if world.launcher == "none" and layouts != [(1, 1)]:
        return start_each(args, layouts)
    ((_, tensor_parallel),) = layouts
    traffic = record_traffic()
    from albert_ds.parallel.mesh import build_mesh
    from albert_ds.process.rendezvous import join_world
    from albert_lab.measurement import (
        close,
        describe,
        leave_world,
        open_cells,
        take_turns,
        write_profile,
    )
    from albert_lab.peak_memory import held_bytes

    device = join_world(world, tensor_parallel=tensor_parallel)
    mesh = build_mesh(tensor_parallel)
    report = describe_machine(args, device)
    base = held_bytes(device)
    for micro_batch in args.micro_batch:
        configs = plan(args, world.size, tensor_parallel, micro_batch)
        cells = open_cells(configs, mesh, device, warmup=args.warmup, base=base)
        take_turns(cells, traffic, rounds=args.rounds, steps=args.steps)
        if args.profile:
            write_profile(args.profile, cells, traffic)
        described = [describe(cell) for cell in cells]
        report["cells"] += described
        close(cells)
        if mesh.rank == 0:
            print(as_tables({**report, "cells": described}), flush=True)
            if args.output:
                write_report(args.output, report)  # of all cells so far
    leave_world(mesh)
    return 0


def fill_defaults(args, world: World) -> None:
    """What was not typed. Small passes of a GPU are bound by their launches, not by its speed."""
    gpus = count_gpus()
    ranks = gpus or 2 if world.launcher == "none" else world.size
    config = f"{PACKAGE}/ds_configs/zero1_{'bf16' if gpus else 'fp32'}.json"
    args.ranks = args.ranks or [ranks]
    args.micro_batch = args.micro_batch or [32 if gpus else 4]
    args.steps = args.steps or (5 if gpus else 1)
    args.deepspeed_config = args.deepspeed_config or [config]


def choose_layouts(args, world: World) -> list[tuple[int, int]]:
    """All (ranks, tensor parallel) to measure, checked before any rank starts."""
    if world.launcher != "none":
        if args.ranks != [world.size] or len(args.tensor_parallel) > 1:
            raise UserError(
                f"--ranks, --tensor-parallel: a launcher has started {world.size} ranks; "
                "allowed: those, and one tensor-parallel size"
            )
    layouts, left_out = [], []
    for ranks in args.ranks:
        for tensor_parallel in args.tensor_parallel:
            if ranks % tensor_parallel:
                left_out.append(f"{ranks} ranks with --tensor-parallel {tensor_parallel}")
                continue
            layouts.append((ranks, tensor_parallel))
            for micro_batch in args.micro_batch:
                plan(args, ranks, tensor_parallel, micro_batch)
                check_batches(args, micro_batch)
    if not layouts:
        raise UserError(f"{', '.join(left_out)}: must divide the ranks evenly")
    if left_out:
        log_line(f"left out: {', '.join(left_out)}")
    if args.profile and args.profile == args.output:
        raise UserError(f"--profile {args.profile}: is also --output; name another file")
    if args.profile and len(layouts) * len(args.micro_batch) > 1:
        raise UserError("--profile: a sweep; allowed: with one layout and micro-batch")
    return layouts


def check_batches(args, micro_batch: int) -> None:
    """Raise UserError if the batches of a rank alone fill this machine's memory."""
    # Eight are made beforehand, of four 64-bit numbers a token.
    needed = micro_batch * args.sequence_length * 8 * 4 * 8
    memory = psutil.virtual_memory().total
    if needed > memory:
        raise UserError(
            f"--micro-batch {micro_batch}: its tokens need {needed / 1e9:,.0f} GB, this machine "
            f"has {memory / 1e9:,.0f}"
        )


def plan(args, ranks: int, tensor_parallel: int, micro_batch: int) -> list[RunConfig]:
    """A run for every model, configuration and checkpointing mode in one layout."""
    configs = []
    for file, name, mode in itertools.product(
        args.deepspeed_config, args.models, args.activation_checkpointing
    ):
        size = replace(SIZES[name], vocab_size=args.vocab_size)
        if args.dropout is not None:
            size = replace(size, dropout=args.dropout)
        configs.append(
            bench_config(
                name,
                size,
                deepspeed_config=file,
                micro_batch_size=micro_batch,
                sequence_length=args.sequence_length,
                ranks=ranks,
                tensor_parallel=tensor_parallel,
                accumulation=args.accumulation,
                activation_checkpointing=mode,
                data=args.data,
            )
        )
    return configs


def start_each(args, layouts: list[tuple[int, int]]) -> int:
    """Start the ranks of each layout, one layout after the other, and join their reports."""
    report: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        for ranks, tensor_parallel in layouts:
            flags = {"--ranks": str(ranks), "--tensor-parallel": str(tensor_parallel)}
            code = start_ranks(ranks, {**flags, "--output": str(part)})
            if code:
                return code
            measured = read_json(part)
            report = {**measured, "cells": [*report.get("cells", []), *measured["cells"]]}
            if args.output:
                write_report(args.output, report)
    return 0


def describe_machine(args, device) -> dict:
    import torch

    from albert_ds.checkpoint.run_folder import read_versions
    from albert_ds.training.metrics import peak_flops

    on_gpu = device.type == "cuda"
    threads = torch.get_num_threads()
    peak = peak_flops(device) if args.peak_tflops is None else 1e12 * args.peak_tflops
    return {
        "device": torch.cuda.get_device_name(device)
        if on_gpu
        else f"CPU, {threads} threads a rank",
        "on_gpu": on_gpu,
        "cores": os.cpu_count(),
        "peak_flops": peak,
        "settings": {name: str(value) for name, value in vars(args).items()},
        "versions": read_versions(),
        "cells": [],
    }
