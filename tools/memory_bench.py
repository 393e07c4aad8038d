#!/usr/bin/env python
"""The fullest moment of a step's memory, measured beside what albert_ds/scaling/memory.py counts.

Every cell is the trainer's own `build` and two steps, in processes of its own. On a CPU the bytes
that tensors take are followed by the profiler at PyTorch's allocator, so libraries and the
allocator's reserves are not in them; on CUDA they are torch.cuda.max_memory_allocated. Rows are
full and dropout is 0: on a CPU dropout keeps other things than on CUDA.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from albert_ds.bench import bench_config, open_bench_run
from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser, positive
from albert_ds.measure.ranks import start_ranks
from albert_ds.model.config import SIZES
from albert_ds.parallel.mesh import build_mesh
from albert_ds.runtime.ending import say
from albert_ds.runtime.launch import join_world, read_world
from albert_ds.runtime.traffic import record_traffic
from albert_ds.scaling.layout import CHECKPOINTING, Layout
from albert_ds.scaling.memory import predict_memory


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/memory_bench.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, default=["albert-base"], help="sizes")
    add("--ranks", type=positive, default=1, help="processes to start where no launcher has")
    add("--micro-batch-size", type=positive, nargs="+", default=[2], help="samples of a pass")
    add("--accumulation", type=positive, default=1, help="passes of a step")
    add("--sequence-length", type=positive, default=256, help="tokens of a row, all real")
    add("--activation-checkpointing", nargs="+", choices=CHECKPOINTING, default=["none"])
    add("--deepspeed_config", nargs="+", default=["ds_configs/zero0_fp32.json"], metavar="FILE")
    add("--output", type=Path, help="JSON with every raw number; added to where it exists")
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
            raise UserError("under a launcher: one model, configuration, micro-batch and mode")
        return measure_here(args, world)
    found = []
    with TemporaryDirectory() as folder:
        part = Path(folder) / "cell.json"
        for name, file, micro, again in cells:
            flags = ["--models", name, "--deepspeed_config", file, "--output", str(part)]
            flags += ["--micro-batch-size", str(micro), "--activation-checkpointing", again]
            code = start_ranks([*argv, *flags], args.ranks)
            if code:
                return code
            found.append(json.loads(part.read_text()))
    print(as_table(found))
    if args.output:
        before = json.loads(args.output.read_text()) if args.output.exists() else []
        args.output.write_text(json.dumps(before + found, indent=1) + "\n")
    return 0


def measure_here(args, world) -> int:
    """One cell, as one of its ranks; rank 0 writes it."""
    traffic = record_traffic()
    device = join_world(world)
    mesh = build_mesh(1)
    (name,), (again,) = args.models, args.activation_checkpointing
    config = bench_config(
        name,
        replace(SIZES[name], dropout=0.0),
        deepspeed_config=args.deepspeed_config[0],
        micro_batch_size=args.micro_batch_size[0],
        sequence_length=args.sequence_length,
        data_parallel=mesh.dp_size,
        accumulation=args.accumulation,
        activation_checkpointing=again,
    )
    cell = measure(config, mesh, device, traffic)
    if mesh.rank == 0:
        args.output.write_text(json.dumps(cell))
    return 0


def measure(config, mesh, device, traffic) -> dict:
    """Two steps of one configuration: measured and predicted bytes of this rank's fullest moment.

    Collective.
    """
    from albert_ds.train import next_batch, train_step

    run = open_bench_run(config, mesh, device, traffic)
    lives = held_bytes(device)
    for _ in range(2):  # the first also sets things up
        with PeakBytes(device) as stepped:
            train_step(run, next_batch(run))
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
        zero=ds_config.get("zero_optimization", {}).get("stage", 0),
        micro_batch_size=config.micro_batch_size,
        accumulation=config.batch_size // (config.micro_batch_size * mesh.dp_size),
        sequence_length=config.stream.sequence_length,
        precision="bf16" if ds_config.get("bf16", {}).get("enabled") else "fp32",
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
    """The most that is allocated within a `with`, beyond what was at its start."""

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
    lines = [
        "| model | configuration | ranks | pass | checkpointing | measured MB | predicted MB | "
        "error |",
        "| --- | --- | ---: | --- | --- | ---: | ---: | ---: |",
    ]
    for cell in cells:
        rows = f"{cell['micro_batch_size']} x {cell['sequence_length']} x {cell['accumulation']}"
        measured, predicted = cell["measured"]["peak"], cell["predicted"]["peak"]
        lines.append(
            f"| {cell['model']} | {cell['deepspeed_config']} | {cell['ranks']} | {rows} | "
            f"{cell['activation_checkpointing']} | {measured / 1e6:.0f} | {predicted / 1e6:.0f} | "
            f"{cell['error']:+.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
