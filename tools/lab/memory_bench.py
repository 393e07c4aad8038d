#!/usr/bin/env python
"""Measure the peak memory of a step, and compare it with tools/albert_lab/scaling/memory.py.

Every combination of the flags takes two of the trainer's steps in processes of its own. On a CPU
the profiler follows the bytes of tensors at PyTorch's allocator, without libraries and the
allocator's reserves; on CUDA the figure is torch.cuda.max_memory_allocated. Rows are full, and
dropout is 0: on a CPU dropout keeps other tensors than on CUDA.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from albert_lab.bench_run import (
    accumulation_of,
    bench_config,
    open_bench_run,
    precision_of,
    stage_of,
    take_step,
)
from albert_lab.ranks import start_ranks
from albert_lab.scaling.layout import CHECKPOINTING, Layout
from albert_lab.scaling.memory import predict_memory
from albert_lab.tables import table

from albert_ds import cli
from albert_ds.cli import Parser, positive
from albert_ds.errors import UserError
from albert_ds.files import write_file
from albert_ds.json_files import check, read_json
from albert_ds.model.config import SIZES
from albert_ds.parallel.mesh import build_mesh
from albert_ds.process.world import read_world
from albert_ds.report.traffic import record_traffic


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/memory_bench.py", description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, default=["albert-base"], help="sizes")
    add("--sharing", metavar="HOW", help="pattern of train.py --sharing (default: the size's own)")
    add("--per-layer", default="none", metavar="WHAT", help="what layers have of their own")
    add("--ranks", type=positive, default=1, help="processes to start without a launcher")
    text = "sequences per micro-batch"
    add("--micro-batch-size", type=positive, nargs="+", default=[2], help=text)
    add("--accumulation", type=positive, default=1, help="micro-batches per optimizer step")
    add("--sequence-length", type=positive, default=256, help="tokens of a synthetic row")
    mode, text = "--activation-checkpointing", "what backward recomputes"
    add(mode, nargs="+", choices=CHECKPOINTING, default=["none"], help=text)
    file = ["ds_configs/zero0_fp32.json"]
    add(
        "--deepspeed_config",
        nargs="+",
        type=cli.path,
        default=file,
        metavar="FILE",
        help="DeepSpeed's JSON files",
    )
    add("--output", type=cli.new_file, help="JSON with every raw number; added to where it exists")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    cells = list(
        itertools.product(
            args.models, args.deepspeed_config, args.micro_batch_size, args.activation_checkpointing
        )
    )
    world = read_world()
    if world.launcher != "none":
        if len(cells) > 1:
            raise UserError(
                "--models, --deepspeed_config, --micro-batch-size, --activation-checkpointing: "
                "several values under a launcher; allowed: one each"
            )
        cell = measure_cell(args, record_traffic())
        if world.rank == 0:
            write_file(args.output, json.dumps(cell))
        return 0
    found, before = [], []
    if args.output and args.output.exists():
        report = read_json(args.output)
        check(report, {"cells": [dict]}, str(args.output))
        before = report["cells"]
    with TemporaryDirectory() as folder:
        part = Path(folder) / "cell.json"
        for name, file, micro, again in cells:
            flags = ["--models", name, "--deepspeed_config", file, "--output", str(part)]
            flags += ["--micro-batch-size", str(micro), "--activation-checkpointing", again]
            code = start_ranks(args.ranks, *flags)
            if code:
                return code
            found.append(read_json(part))
    print(as_table(found))
    if args.output:
        report = {"cells": [*before, *found]}
        write_file(args.output, json.dumps(report, indent=1) + "\n")
    return 0


def measure_cell(args, traffic) -> dict:
    """The one cell of `args`, measured as one of its ranks. Collective."""
    from albert_ds.process.rendezvous import join_world

    device = join_world(read_world())
    mesh = build_mesh(1)
    (name,), (again,) = args.models, args.activation_checkpointing
    changes = {"sharing": args.sharing or SIZES[name].sharing, "per_layer": args.per_layer}
    config = bench_config(
        name,
        replace(SIZES[name], dropout=0.0, **changes),
        deepspeed_config=args.deepspeed_config[0],
        micro_batch_size=args.micro_batch_size[0],
        sequence_length=args.sequence_length,
        data_parallel=mesh.dp_size,
        accumulation=args.accumulation,
        activation_checkpointing=again,
    )
    return measure(config, mesh, device, traffic)


def measure(config, mesh, device, traffic) -> dict:
    """Take two steps: measured and predicted peak bytes of this rank. Collective."""
    run = open_bench_run(config, mesh, device, traffic)
    lives = held_bytes(device)
    for _ in range(2):  # the first step also allocates what all steps use
        with PeakBytes(device) as stepped:
            take_step(run)
    peak = lives + stepped.peak
    layout = describe(config, mesh)
    memory = predict_memory(layout, on_cuda=device.type == "cuda")
    run.engine.deepspeed.destroy()
    return {
        "model": config.size,
        "deepspeed_config": Path(config.deepspeed_config).name,
        "ranks": mesh.world_size,
        "micro_batch_size": layout.micro_batch_size,
        "accumulation": layout.accumulation,
        "sequence_length": layout.sequence_length,
        "activation_checkpointing": layout.activation_checkpointing,
        "device": str(device),
        "measured": {"lives": lives, "peak": peak},
        "predicted": {"lives": memory.lives, "peak": memory.peak},
        "error": memory.peak / peak - 1,
    }


def describe(config, mesh) -> Layout:
    ds_config = config.deepspeed
    return Layout(
        name=config.size,
        model=config.model,
        ranks=mesh.world_size,
        zero=stage_of(ds_config),
        micro_batch_size=config.micro_batch_size,
        accumulation=accumulation_of(config, mesh),
        sequence_length=config.stream.sequence_length,
        precision=precision_of(ds_config),
        activation_checkpointing=config.activation_checkpointing,
    )


def held_bytes(device) -> int:
    """Bytes of all tensors of this process."""
    import torch

    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class PeakBytes:
    """The peak of the bytes allocated within a `with`, beyond those at its start."""

    def __init__(self, device):
        self.device = device
        self.peak = 0

    def __enter__(self) -> PeakBytes:
        import torch

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(self, *ending) -> None:
        import torch

        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._profile.__exit__(*ending)
        found = self._profile.kineto_results
        assert found is not None
        changes = [e for e in found.events() if e.name() == "[memory]"]
        events = [(e.start_ns(), e.nbytes()) for e in changes]  # ty: ignore (not in its stubs)
        held = 0
        for _, change in sorted(events, key=lambda event: event[0]):
            held += change
            self.peak = max(self.peak, held)


def as_table(cells: list[dict]) -> str:
    header = ("model", "configuration", "ranks", "micro-batch", "checkpointing", "measured MB")
    rows = [
        [
            *(cell["model"], cell["deepspeed_config"], cell["ranks"]),
            f"{cell['micro_batch_size']} x {cell['sequence_length']} x {cell['accumulation']}",
            cell["activation_checkpointing"],
            f"{cell['measured']['peak'] / 1e6:.0f}",
            f"{cell['predicted']['peak'] / 1e6:.0f}",
            f"{cell['error']:+.1%}",
        ]
        for cell in cells
    ]
    return table((*header, "predicted MB", "error"), rows)


if __name__ == "__main__":
    cli.run(main)
