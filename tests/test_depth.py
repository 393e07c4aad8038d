"""Depth that grows: exact through stops and other layouts, on the same stream; wrong words."""

from dataclasses import replace

import pytest

from albert_ds.data.shards import open_shards
from albert_ds.errors import UserError
from albert_ds.model.config import count_flops
from albert_ds.model.depth import list_depths, read_depths
from albert_ds.report import screen
from tests.batches import random_samples
from tests.distributed import run_ranks
from tests.reference import update_error
from tests.test_layout_change import Leg, config_of, run_leg
from tests.training import SMALL, join, open_small_run, small_config

SCHEDULE = "1@0,2@25%,3@3"  # of 4 steps
LEGS = (Leg(stage=3, data_parallel=2), Leg(stage=1, data_parallel=1, tensor_parallel=2))
WEIGHTS = "weights.safetensors"


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Two legs of two steps in other layouts, and one process without a stop or a schedule."""
    folder, vocab_size = tmp_path_factory.mktemp("runs"), open_shards(data, "train").vocab.size

    def run(leg: Leg, name: str, steps: int, schedule: str | None):
        (folder / name).mkdir(exist_ok=True)
        config = replace(config_of(leg, data, vocab_size, folder / name), steps=4)
        return run_ranks(run_leg, leg.world_size, replace(config, depth_schedule=schedule), steps)

    legs = [run(leg, "legs", 2, SCHEDULE) for leg in LEGS]
    alone = Leg(stage=0, data_parallel=1)
    return legs, run(alone, "whole", 4, SCHEDULE)[0], run(alone, "full", 4, None)[0]


def test_a_schedule_is_exact_through_a_stop_and_another_layout(runs):
    legs, (_, losses, _, start, end), _ = runs
    found = [loss for leg in legs for loss in leg[0][1]]
    assert found == pytest.approx(losses, rel=1e-6)
    assert update_error(legs[-1][0][4][WEIGHTS], end[WEIGHTS], start[WEIGHTS]) <= 1e-5


def test_it_runs_other_depths_on_the_same_stream(runs):
    _, (_, losses, seen, start, _), (_, full, all_seen, all_start, _) = runs
    assert seen == all_seen
    assert start[WEIGHTS].keys() == all_start[WEIGHTS].keys()
    assert abs(losses[0] - full[0]) > 1e-4  # one layer instead of three


def test_each_step_runs_the_depth_of_its_part():
    parts = [(model.num_layers, steps) for model, steps in list_depths(SMALL, SCHEDULE, 4)]
    assert parts == [(1, 1), (2, 2), (3, 1)]
    assert list_depths(SMALL, None, 4) == [(SMALL, 4)]
    work = [
        count_flops(model, tokens=64, squared_lengths=64**2, masked=9)
        for model, _ in list_depths(SMALL, SCHEDULE, 4)
    ]
    assert work[1] - work[0] == work[2] - work[1] > 0


def count_steps(rank: int, config, batches: list) -> list[int]:
    from albert_ds.pretraining.loop import next_batch, train_step

    run = open_small_run(config, batches, *join(1))
    found = []
    for _ in batches:
        train_step(run, next_batch(run))
        found.append(run.window.close(run.mesh, "sop")["flops"])
    return found


def test_logged_flops_are_those_of_the_depth_that_ran():
    samples = random_samples(8, vocab_size=SMALL.vocab_size, max_length=32, seed=0)
    config = replace(small_config(world_size=1, steps=4), depth_schedule=SCHEDULE)
    found = run_ranks(count_steps, 1, config, [samples] * 4)[0]
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch = {
        "tokens": sum(lengths),
        "squared_lengths": sum(length**2 for length in lengths),
        "masked": sum(len(sample["masked_positions"]) for sample in samples),
    }
    depths = (1, 2, 2, 3)
    assert found == [count_flops(replace(SMALL, num_layers=depth), **batch) for depth in depths]


def test_the_time_left_is_that_of_the_depths_to_come(monkeypatch, capsys):
    """A second a layer: steps of 1, 2, 2 and 3 layers, measured from the first line on."""
    config = replace(small_config(world_size=1, steps=4), depth_schedule=SCHEDULE)
    assert [config.work_of(step) for step in range(5)] == [8 * 32 * n for n in (0, 1, 3, 5, 8)]
    clock = iter((0.0, 1.0, 3.0, 5.0, 8.0))
    monkeypatch.setattr(screen.time, "perf_counter", lambda: next(clock))
    shown = screen.Screen(step=0, num_steps=4, work_of=config.work_of)
    values = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0}
    for step in range(1, 5):
        shown.write(step, values)
    ends = [line.partition("left")[2].split() for line in capsys.readouterr().out.splitlines()]
    assert ends == [["7", "s"], ["5", "s"], ["3", "s"], ["0", "s"]]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("1@0,3", "'3': must be VALUE@STEP or VALUE@SHARE%"),
        ("0@0", "'0@0': 0: must be at least 1"),
        ("1@1,3@2", "'1@1': starts at step 1; the first must start at 0"),
        ("1@0,3@100%", "'3@100%': starts at step 8; the first must"),
        ("1@0,2@50%,3@50%", "'3@50%': starts at step 4"),
        ("1@0,2@4", "must end with --num-layers 3"),
        ("1@0..3@4", "'3@4': changes in jumps only"),
    ],
)
def test_a_wrong_schedule_is_refused(schedule, words):
    with pytest.raises(UserError, match="--depth-schedule") as refused:
        list_depths(SMALL, schedule, 8)
    assert words in str(refused.value)
    assert [(p.value, p.start) for p in read_depths(SMALL, "1@0,3@4", 8).points] == [(1, 0), (3, 4)]


def test_depths_that_leave_parameters_out_are_refused():
    for changes, reason in (
        ({"sharing": "none"}, "--sharing none uses other blocks"),
        ({"per_layer": "scale"}, "each layer has parameters of its own"),
    ):
        with pytest.raises(UserError, match=reason):
            list_depths(replace(SMALL, **changes), SCHEDULE, 4)
