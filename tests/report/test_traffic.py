"""Every byte is counted, and one optimizer step reduces the unique parameters once.

The expected bytes are computed here: 4 for each unique parameter in fp32.
"""

from dataclasses import replace

from albert_ds.model.shapes import count_params
from tests.distributed import run_ranks
from tests.training import SMALL, join, open_small_run, small_batches, small_config, take_step

BATCHES = small_batches(3, 16)


def measure(rank: int, configs, batches):
    """Traffic of the last step of each config, by collective."""
    joined = join(1)
    traffic = joined[2]
    moved = []
    for config in configs:
        run = open_small_run(config, batches)
        for _ in batches:
            before = traffic.copy()
            take_step(run)
        step = traffic - before
        moved.append((dict(step.calls), dict(step.bytes)))
    return moved


def test_bytes_of_a_step():
    deep = replace(SMALL, num_layers=6)  # shared: as many parameters as with 3 layers
    lamb_and_adamw = [
        {"optimizer": {"type": name, "params": {"lr": 0.01}}} for name in ("Lamb", "AdamW")
    ]
    configs = [
        small_config(world_size=2, model=model, batch_size=16, ds_changes=changes)
        for model, changes in (
            *((SMALL, {"zero_optimization": {"stage": stage}}) for stage in (0, 1)),
            *((deep, {"zero_optimization": {"stage": stage}}) for stage in (0, 1)),
            *((SMALL, changes) for changes in lamb_and_adamw),
        )
    ]
    shallow0, shallow1, *deeper, lamb, adamw = run_ranks(measure, 2, configs, BATCHES)[0]
    parameters = sum(count_params(SMALL).values())
    gradients = 4 * parameters
    # ZeRO-0: the gradients once, after 4 micro-batches, and small vectors.
    calls, moved = shallow0
    assert set(calls) == {"all_reduce"}
    assert gradients <= moved["all_reduce"] <= gradients * 1.02
    # ZeRO-1: the same reduction, and one gather of the updated weights (padded to 2 ranks).
    calls, moved = shallow1
    assert gradients <= moved["all_reduce"] <= gradients * 1.02
    assert gradients <= moved["all_gather_into_tensor"] <= gradients * 1.001
    # A block used six times is reduced once.
    assert deeper == [shallow0, shallow1]
    # LAMB adds one small reduction, of two float64 sums for each tensor that it adapts: word, type,
    # position, projection; q, k, v, output, up, down; pooler, MLM transform, pair head.
    more_calls, more_bytes = (
        a["all_reduce"] - b["all_reduce"] for a, b in zip(lamb, adamw, strict=True)
    )
    assert (more_calls, more_bytes) == (1, 2 * 8 * 13)


def record_too_late(rank: int, config) -> tuple[int, int]:
    """Bytes of a step's gathers as counted from the start, and by a recorder that starts late."""
    from albert_ds.report.traffic import record_traffic

    early, late = join(1)[2], record_traffic()
    run = open_small_run(config, BATCHES)
    before, late_before = early.copy(), late.copy()
    take_step(run)
    name = "all_gather_into_tensor"
    return (early - before).bytes[name], (late - late_before).bytes[name]


def test_recording_must_begin_before_the_process_group():
    # DeepSpeed keeps a reference to the gather that it found when its process group was opened.
    config = small_config(world_size=2, batch_size=16)
    counted, counted_late = run_ranks(record_too_late, 2, config)[0]
    assert counted >= 4 * sum(count_params(SMALL).values())
    assert counted_late == 0
