"""A step's time is split into parts that add up to it, and a wait is charged to what it waits for.

Delays of known length are put where they can be told apart; only that they arrive is asserted.
"""

import time

import pytest

from albert_ds.lab.step_breakdown import PARTS, Span, split
from tests.batches import random_samples
from tests.distributed import run_ranks
from tests.training import SMALL, join, open_small_run, small_config

DELAY = 0.4
BATCHES = [
    random_samples(8, vocab_size=SMALL.vocab_size, max_length=32, seed=seed) for seed in range(3)
]


def spans(*rows: tuple[str, float, float]) -> list[Span]:
    return [Span(part=part, begun=begun, ended=ended) for part, begun, ended in rows]


def test_each_moment_belongs_to_the_innermost_part():
    found = split(
        spans(
            ("communication", 5, 7),  # noted before what is around it, as it ends earlier
            ("backward", 4, 8),
            ("forward", 1, 4),
            ("optimizer", 9, 10),  # nothing but a wait
            ("communication", 9, 10),
            ("other", 0, 12),
        )
    )
    assert found == {
        "forward": 3,
        "backward": 2,
        "communication": 3,
        "optimizer": 0,
        "data_wait": 0,
        "other": 4,
    }


def measure_delays(rank: int, configs) -> list[dict]:
    """A step of each config in which rank 1 is late in backward, and batches come late."""
    from albert_ds.lab.step_breakdown import watch
    from albert_ds.train import next_batch, train_step

    joined = join(1)
    found = []
    for config in configs:
        run = open_small_run(config, BATCHES, *joined)
        for samples in range(2):  # the first sets things up
            if samples == 1:
                run.batches = late(run.batches)
                if rank == 1:
                    late_in_backward(run.engine.deepspeed.module)
            with watch(run, joined[2]) as stopwatch:
                started = time.perf_counter()
                with stopwatch.span("other"):
                    train_step(run, next_batch(run))
                seconds = time.perf_counter() - started
        found.append({"seconds": seconds, **split(stopwatch.spans())})
    return found


def late(batches):
    for batch in batches:
        time.sleep(DELAY)
        yield batch


def late_in_backward(module) -> None:
    """Once a pass: when the gradient of what the heads are given is known."""

    def wait(gradient):
        time.sleep(DELAY)

    module.albert.encoder.register_forward_hook(
        lambda module, given, hidden: hidden[-1].register_hook(wait) and None
    )


def test_parts_add_up_and_a_wait_is_communication():
    configs = [
        small_config(world_size=2, ds_changes={"zero_optimization": {"stage": stage}})
        for stage in (0, 1)
    ]
    passes = configs[0].batch_size // (2 * configs[0].micro_batch_size)
    for punctual, tardy in zip(*run_ranks(measure_delays, 2, configs), strict=True):
        for found in (punctual, tardy):
            assert sum(found[part] for part in PARTS) == pytest.approx(found["seconds"], rel=0.02)
            assert min(found.values()) >= 0
            assert found["forward"] > 0 and found["optimizer"] > 0
            assert found["data_wait"] >= passes * DELAY
        assert tardy["backward"] >= passes * DELAY > punctual["backward"]
        assert punctual["communication"] >= passes * DELAY > tardy["communication"]


def reduce_and_work(rank: int) -> list[dict]:
    """Two all-reduces for which rank 1 comes late; the second is waited for at once."""
    import torch
    import torch.distributed as dist

    from albert_ds.lab.comm_trace import EventRecorder, clock_of, sum_up

    device, mesh, traffic = join(1)
    found = []
    for work in (2 * DELAY, 0):
        traffic.observer = recorder = EventRecorder(clock_of(device))
        tensor = torch.ones(10_000)
        dist.barrier()
        time.sleep(rank * DELAY)
        handle = dist.all_reduce(tensor, async_op=True)
        time.sleep(work)
        handle.wait()
        assert float(tensor[0]) == 2
        (volume,) = sum_up(recorder.events, mesh, recorder.clock).values()
        report = volume.report(1)
        found.append({"seconds": volume.seconds, "hidden": report["hidden_seconds"]})
    return found


def test_what_is_hidden_behind_work_is_told_from_what_is_waited_for():
    (overlapped, waited_for), _ = run_ranks(reduce_and_work, 2)
    for found in (overlapped, waited_for):
        assert found["seconds"] >= 0.9 * DELAY
    assert overlapped["hidden"] >= 0.9 * overlapped["seconds"]
    assert waited_for["hidden"] <= 0.1 * waited_for["seconds"]
