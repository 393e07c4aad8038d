"""Models in a layout, over links of several speeds: built, warmed up, and measured in turns.

All models take a turn over one link, then all over the next, and so on again (A B A B ...): what
drifts in the machine meets all of them alike, and a ratio of neighbours does not see it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.bench import open_bench_run, precision_of, stage_of
from albert_ds.config import RunConfig
from albert_ds.measure.link import Rate, is_in_node, shape
from albert_ds.measure.memory import PeakMemory
from albert_ds.measure.rounds import measure_round, take_step
from albert_ds.measure.split import watch
from albert_ds.model.arithmetic import count_params
from albert_ds.runtime.launch import read_world

if TYPE_CHECKING:
    import torch

    from albert_ds.parallel.mesh import Mesh
    from albert_ds.runtime.traffic import Traffic
    from albert_ds.train import Run


@dataclass(kw_only=True, slots=True)
class Cell:
    """A model over a link, and what was measured of it."""

    run: Run
    link: Rate | None  # None: no limit
    peak_memory: int | None  # bytes a rank at the most; None where no warm-up step was made
    process_memory: int  # of them, what the process held before the first model
    rounds: list[dict] = field(default_factory=list)


def open_cells(
    configs: list[RunConfig],
    mesh: Mesh,
    device: torch.device,
    traffic: Traffic,
    *,
    links: list[Rate | None],
    warmup: int,
    base: int | None = None,
) -> list[Cell]:
    """Build every model and take its first steps over links without a limit. Collective.

    `base`: bytes that the process held before its first model.
    """
    cells: list[Cell] = []
    for config in configs:
        memory = PeakMemory(device, base)
        base = memory.base
        run = open_bench_run(config, mesh, device, traffic)
        memory.restart()
        with watch(run, traffic) as stopwatch:
            for _ in range(warmup):
                take_step(run, stopwatch)
        peak = _largest(memory.read(), mesh) if warmup else None
        cells += [Cell(run=run, link=link, peak_memory=peak, process_memory=base) for link in links]
    return cells


def take_turns(cells: list[Cell], traffic: Traffic, *, rounds: int, steps: int) -> None:
    """Measure every cell `rounds` times. Collective."""
    links = list(dict.fromkeys(cell.link for cell in cells))
    shapes_link = is_in_node() and read_world().local_rank == 0
    before = None
    for _ in range(rounds):
        for link in links:
            if shapes_link:
                shape(link, before)
            before = link
            for cell in cells:
                if cell.link == link:
                    turn = measure_round(cell.run, steps, traffic, is_in_node=is_in_node())
                    cell.rounds.append({**turn, "peak_memory": cell.peak_memory})
    if shapes_link:
        shape(None, before)


def close(cells: list[Cell]) -> None:
    """Let go of the engines."""
    for engine in {id(cell.run.engine): cell.run.engine for cell in cells}.values():
        engine.deepspeed.destroy()
    cells.clear()


def _largest(value: int, mesh: Mesh) -> int:
    import torch
    import torch.distributed as dist

    box = torch.tensor(value)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=mesh.control_group)
    return int(box)


def write_profile(path: Path, cells: list[Cell], traffic: Traffic) -> None:
    """One more step of each model as rank 0 sees it, named by model and part of the step."""
    from torch.profiler import profile, record_function

    with profile() as trace:
        for cell in cells:
            with watch(cell.run, traffic) as stopwatch, record_function(cell.run.config.size):
                take_step(cell.run, stopwatch)
    if cells[0].run.mesh.rank == 0:
        trace.export_chrome_trace(str(path))


def describe(cell: Cell, nodes: int) -> dict:
    """The cell as it stands in the report."""
    config, mesh = cell.run.config, cell.run.mesh
    return {
        "model": config.size,
        "parameters": sum(count_params(config.model).values()),
        "parameters_a_rank": count_parameters(cell.run),
        "precision": precision_of(config.deepspeed),
        "deepspeed_config": config.deepspeed_config,
        "zero": stage_of(config.deepspeed),
        "micro_batch_size": config.micro_batch_size,
        "accumulation": config.batch_size // (config.micro_batch_size * mesh.dp_size),
        "sequence_length": config.stream.sequence_length,
        "activation_checkpointing": config.activation_checkpointing,
        "ranks": mesh.world_size,
        "tensor_parallel": mesh.tp_size,
        "nodes": nodes,
        "link": cell.link.text if cell.link else None,
        "link_bits_per_second": cell.link.bits_per_second if cell.link else None,
        "process_memory": cell.process_memory,
        "flops_a_step": statistics.mean(turn["flops_a_step"] for turn in cell.rounds),
        "rounds": cell.rounds,
    }


def count_parameters(run: Run) -> int:
    """Unique parameters of a rank's part of the model, before ZeRO divides them."""
    engine = run.engine
    return sum(
        shape.numel() // (1 if engine.shard_dims[name] is None else run.mesh.tp_size)
        for name, shape in engine.shapes.items()
    )
