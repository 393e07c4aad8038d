"""A step's time is split into parts that add up to it, and a wait is charged to what it waits for.

Delays are put where they can be told apart. A busy machine adds delays of its own to either rank,
so what a rank must have waited is reckoned from the moments at which the other one arrived.
"""

import time

import pytest
from albert_lab.step_breakdown import PARTS, Span, split

from tests.distributed import METHOD, run_ranks
from tests.runs import join, open_small_run, small_batches, small_config, take_step

DELAY = 0.3
on_one_clock = pytest.mark.skipif(
    METHOD == "spawn", reason="each GPU has a clock of its own: moments of two cannot be compared"
)
BATCHES = small_batches(3)


def spans(*rows: tuple[str, float, float]) -> list[Span]:
    return [Span(part=part, begun=begun, ended=ended) for part, begun, ended in rows]


def test_each_moment_belongs_to_the_innermost_part():
    seconds = split(
        spans(
            ("communication", 5, 7),  # noted before what is around it, as it ends earlier
            ("backward", 4, 8),
            ("forward", 1, 4),
            ("optimizer", 9, 10),  # nothing but a wait
            ("communication", 9, 10),
            ("other", 0, 12),
        )
    )
    assert seconds == {
        "forward": 3,
        "backward": 2,
        "communication": 3,
        "optimizer": 0,
        "data_wait": 0,
        "other": 4,
    }


def measure_delays(rank: int, configs) -> list[dict]:
    """A step of each config in which rank 1 is late in backward, and batches come late."""
    from albert_lab.comm_trace import group_size
    from albert_lab.step_breakdown import watch

    from tests.preload import TRAFFIC

    steps = []
    for config in configs:
        run = open_small_run(config, BATCHES)
        for samples in range(2):  # the first sets things up
            if samples == 1:
                run.batches = late(run.batches)
                if rank == 1:
                    late_in_backward(run.engine.deepspeed.module)
            _, mesh = join(1)
            with watch(run, TRAFFIC) as stopwatch:
                moments = [time.perf_counter()]
                with stopwatch.span("other"):
                    moments.append(time.perf_counter())
                    take_step(run)
                    moments.append(time.perf_counter())
                moments.append(time.perf_counter())
        steps.append(
            {
                "at_least": moments[2] - moments[1],
                "at_most": moments[3] - moments[0],
                # An all-reduce of the one tensor-parallel rank waits for nobody.
                "collectives": [
                    (event.collective, event.begun, event.waits[-1][0])
                    for event in stopwatch.events
                    if group_size(event, mesh) == 2
                ],
                "parts": split(stopwatch.spans()),
            }
        )
    return steps


def shortest_wait(rank: dict, other: dict) -> float:
    """Seconds: an all-reduce that `rank` waits for ends after the other one has called it too."""
    total = 0.0
    for own, peer in zip(rank["collectives"], other["collectives"], strict=True):
        (kind, _, waits_from), (their_kind, called, _) = own, peer
        assert kind == their_kind
        if kind == "all_reduce":
            total += max(0.0, called - waits_from)
    return total


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


@on_one_clock
def test_parts_add_up_and_a_wait_is_communication():
    configs = [small_config(world_size=2, stage=stage) for stage in (0, 1)]
    passes = configs[0].batch_size // (2 * configs[0].micro_batch_size)
    for punctual, tardy in zip(*run_ranks(measure_delays, 2, configs), strict=True):
        for rank, other in ((punctual, tardy), (tardy, punctual)):
            parts = rank["parts"]
            assert rank["at_least"] <= sum(parts[part] for part in PARTS) <= rank["at_most"]
            assert min(parts.values()) >= 0
            assert parts["forward"] > 0 and parts["optimizer"] > 0
            assert parts["data_wait"] >= passes * DELAY
            assert parts["communication"] >= shortest_wait(rank, other)
        assert tardy["parts"]["backward"] >= passes * DELAY


def reduce_and_work(rank: int) -> list[dict]:
    """Two all-reduces for which rank 1 comes late; the second is waited for at once.

    Of each: what was noted, and the moments around its call and its wait.
    """
    import torch
    import torch.distributed as dist
    from albert_lab.comm_trace import EventRecorder, clock_of, sum_up

    from tests.preload import TRAFFIC

    device, mesh = join(1)
    records = []
    for works_on in (True, False):
        TRAFFIC.observer = recorder = EventRecorder(clock_of(device))
        tensor = torch.ones(10_000)
        dist.barrier()
        time.sleep(rank * DELAY)
        moments = [time.perf_counter()]
        handle = dist.all_reduce(tensor, async_op=True)
        moments.append(time.perf_counter())
        while works_on and not handle.is_completed():
            time.sleep(0.001)
        moments.append(time.perf_counter())
        handle.wait()
        moments.append(time.perf_counter())
        assert float(tensor[0]) == 2
        (volume,) = sum_up(recorder.events, mesh, recorder.clock).values()
        (event,) = recorder.events
        exposed = volume.seconds - volume.report(1)["hidden_seconds"]
        noted = {"seconds": volume.seconds, "exposed": exposed, "waits_from": event.waits[-1][0]}
        records.append({"moments": moments, **noted})
    return records


@on_one_clock
def test_what_is_hidden_behind_work_is_told_from_what_is_waited_for():
    for punctual, tardy in zip(*run_ranks(reduce_and_work, 2), strict=True):
        begun, called, waits, ended = punctual["moments"]
        arrives = tardy["moments"][0]
        assert arrives - called <= punctual["seconds"]
        # All is hidden but the call and the wait, in which the other one may arrive.
        assert arrives - punctual["waits_from"] <= punctual["exposed"]
        assert punctual["exposed"] <= (called - begun) + (ended - waits)
