"""One turn of one model: real steps, what they took, where the time went and what they moved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from albert_ds.measure.link import read_sent_bytes
from albert_ds.measure.split import PARTS, split, watch

if TYPE_CHECKING:
    from albert_ds.runtime.traffic import Traffic
    from albert_ds.train import Run

# Under these names in the report; together they are the step.
SECONDS = {part: f"{part}_seconds" for part in PARTS}


def measure_round(run: Run, steps: int, traffic: Traffic, *, is_in_node: bool) -> dict:
    """Take `steps` optimizer steps; their mean a step, over all ranks. Collective."""
    import torch
    import torch.distributed as dist

    dist.barrier(group=run.mesh.control_group)
    sent = read_sent_bytes() if is_in_node else 0
    with watch(run, traffic) as stopwatch:
        started = time.perf_counter()
        batches = [take_step(run, stopwatch) for _ in range(steps)]
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    found = split(stopwatch.spans())
    mine = {
        "seconds_a_step": seconds / steps,
        **{SECONDS[part]: found[part] / steps for part in PARTS},
        "kinds": count_kinds(traffic.events, run, stopwatch.clock, steps),
        "link_bytes_a_step": (read_sent_bytes() - sent) / steps if is_in_node else None,
    }
    everyone: list[dict] = [{}] * run.mesh.world_size
    dist.all_gather_object(everyone, mine, group=run.mesh.control_group)
    return describe_round(run, everyone, batches)


def take_step(run: Run, stopwatch):
    """The trainer's own; the batch it was given."""
    from albert_ds.train import next_batch, train_step

    with stopwatch.span("other"):
        batch = next_batch(run)
        train_step(run, batch)
    return batch


def count_kinds(events, run: Run, clock, steps: int) -> dict[str, dict]:
    """This rank's traffic a step, by kind."""
    from albert_ds.runtime.volume import sum_up

    return {
        kind: {
            "calls": volume.calls / steps,
            "bytes": volume.bytes / steps,
            "wire_bytes": volume.wire / steps,
            "seconds": volume.seconds / steps,
            "exposed_seconds": volume.exposed_seconds / steps,
            "hidden_seconds": volume.hidden_seconds / steps,
        }
        for kind, volume in sum_up(events, run.mesh, clock).items()
    }


def describe_round(run: Run, everyone: list[dict], batches: list) -> dict:
    """The round as it stands in the report: times are means over ranks, traffic is rank 0's."""
    first, steps = everyone[0], len(batches)
    times = ("seconds_a_step", *SECONDS.values())
    mean = {name: sum(rank[name] for rank in everyone) / len(everyone) for name in times}
    seconds = mean["seconds_a_step"]
    tokens = sum(batch.counts.tokens for batch in batches) / steps
    flops = sum(count_step_flops(run, batch) for batch in batches) / steps
    return {
        **mean,
        "samples_a_second": run.config.batch_size / seconds,
        "tokens_a_second": tokens / seconds,
        "flops_a_step": flops,  # of the model, all ranks together
        "flops_a_second": flops / seconds,
        "wire_bytes_a_step": sum(kind["wire_bytes"] for kind in first["kinds"].values()),
        "link_bytes_a_step": first["link_bytes_a_step"],
        "bytes_a_step": {name: kind["bytes"] for name, kind in first["kinds"].items()},
        "calls_a_step": {name: kind["calls"] for name, kind in first["kinds"].items()},
        "kinds": first["kinds"],
    }


def count_step_flops(run: Run, batch) -> int:
    """Of the model, over the global batch."""
    from albert_ds.model.arithmetic import count_flops

    counts = batch.counts
    return count_flops(
        run.config.model,
        tokens=counts.tokens,
        squared_lengths=counts.squared_lengths,
        masked=counts.masked,
    )
