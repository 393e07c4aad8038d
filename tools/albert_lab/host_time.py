"""The host's part of a step on CUDA, where the host only issues what the device then runs."""

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from albert_ds.training.pretrain import Run, next_batch, run_passes, train_step, update

STEPS = 5  # whose medians are taken


class Clock:
    """The seconds of each named part of a step, one by one."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def span(self, part: str) -> Generator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[part].append(time.perf_counter() - begun)

    def passes(self) -> list[float]:
        """Of each micro-batch, forward and backward."""
        both = zip(self.seconds["forward"], self.seconds["backward"], strict=True)
        return [sum(parts) for parts in both]

    def describe(self, steps: int) -> dict[str, float]:
        """Median ms of so many steps: of forward and backward, and of the update.

        Of a step's first micro-batch, which finds the device idle.
        """
        passes = self.passes()
        return {
            "host_ms": in_ms(passes[:: len(passes) // steps]),
            "update_ms": in_ms(self.seconds["optimizer"]),
        }


def in_ms(seconds: list[float], percentile: float = 50) -> float:
    return round(1e3 * float(np.percentile(seconds, percentile)), 2)


def describe_graphs(run: Run) -> dict:
    """The share of all micro-batches so far that a graph ran, and why no more may."""
    graphs = run.engine.deepspeed.module.graphs
    if graphs is None:
        return {}
    share = 1 - graphs.eager / max(graphs.calls, 1)
    facts = {"by_graph": round(share, 3), "graphs": len(graphs.kept), **graphs.take_counts()}
    return facts | ({"refused": graphs.failure} if graphs.failure is not None else {})


def count_launches(run: Run) -> dict[str, float]:
    """Launches of kernels and of graphs that a micro-batch's passes take; one step. Collective.

    Nothing where torch's profiler does not see them.
    """
    if ProfilerActivity.CUDA not in supported_activities():
        return {}
    batch = next_batch(run)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        run_passes(run, batch)
        torch.cuda.synchronize()
    update(run, batch)
    on_host = (e for e in trace.events() if e.device_type == torch.profiler.DeviceType.CPU)
    launches = sum("Launch" in event.name for event in on_host)
    return {"launches": launches / len(batch.micro_batches)}


def measure_host(run: Run) -> dict:
    """Steps that each wait until the device is done, and what graphs ran until then. Collective."""
    clock = Clock()
    untimed = run.span
    run.span = clock.span
    for _ in range(STEPS):
        torch.cuda.synchronize()
        train_step(run, next_batch(run))
    run.span = untimed
    return {**clock.describe(STEPS), **describe_graphs(run), **count_launches(run)}
