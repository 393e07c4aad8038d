"""Depth that grows: exact through stops and other layouts, on the same stream; wrong words."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from albert_ds.checkpoint.folder import FILES, WEIGHTS
from albert_ds.model.config import count_flops
from albert_ds.model.depth import read_depths
from albert_ds.training import screen
from tests.batches import concatenate
from tests.command import run_command
from tests.distributed import run_ranks
from tests.legs import (
    Case,
    Layout,
    losses_of,
    read_step,
    records,
    rewind,
    run_case,
    run_leg,
    stop_after,
)
from tests.runs import (
    SMALL,
    gather,
    open_small_run,
    small_batches,
    small_config,
    take_step,
    train_ranks,
)
from tests.test_bad_input import argv_of, find_faults

SCHEDULE = "1@0,2@25%,3@3"  # of 4 steps
LEGS = (Layout(stage=3, data_parallel=2), Layout(stage=1, tensor_parallel=2))
STEPS = dict(steps=4, warmup_steps=2, learning_rate=0.01, average=0.8, dropout=0, num_heads=4)
LOOP = replace(SMALL, sharing="loop:1,1x3,1", num_layers=5, per_layer="norm,lora:2,inject")


@pytest.fixture(scope="module", params=["grows", "is drawn"])
def runs(request, data, tmp_path_factory):
    """Two legs of two steps in other layouts, equal to one process; and one without a schedule."""
    folder = tmp_path_factory.mktemp("runs")
    model = dict(num_layers=3)
    schedule = SCHEDULE
    if request.param == "is drawn":
        model = dict(num_layers=5, sharing=LOOP.sharing, per_layer=LOOP.per_layer)
        schedule = "3-5@0"
    flags = {**STEPS, **model, "seed": 34}  # this seed draws 4, 5, 3 and 5 layers
    layout = Layout(stage=0)
    scheduled = {**flags, "depth_schedule": schedule}
    case = Case(config=scheduled, layout=layout, legs=LEGS, cuts=(2,), fault=stop_after)
    pair = run_case(case, data, folder=folder)
    full = run_leg(replace(case, config=flags), layout, None, data, folder / "full")
    return pair, full, folder / "full"


def test_a_schedule_runs_other_depths_on_the_same_stream(runs):
    pair, (full,), folder = runs
    whole = pair.watched[0][0]
    assert whole.seen == full.seen
    assert whole.start[WEIGHTS].keys() == full.start[WEIGHTS].keys()
    losses = zip(losses_of(pair.whole), losses_of(folder), strict=True)
    assert max(abs(one - other) for one, other in losses) > 1e-4


@pytest.mark.parametrize(
    ("schedule", "exits", "depths", "heads"),
    [
        (SCHEDULE, None, (1, 2, 2, 3), (1, 1, 1, 1)),
        (SCHEDULE, "1,2:0.5", (1, 2, 2, 3), (1, 2, 2, 3)),
        ("1-3@0", "2", (2, 3, 1, 3), (1, 2, 1, 2)),  # as seed 34 draws them
    ],
)
def test_logged_flops_are_those_of_the_depth_that_ran(schedule, exits, depths, heads):
    samples = small_batches(1)[0]
    config = replace(small_config(world_size=1, steps=4), seed=34)
    config = replace(config, depth_schedule=schedule, exit_losses=exits)
    (run,) = run_ranks(train_ranks, 1, [config], [samples] * 4)[0]
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch = {"tokens": sum(lengths), "squared_lengths": sum(length**2 for length in lengths)}
    masked = sum(len(sample["masked_positions"]) for sample in samples)
    assert [metrics["flops"] for metrics in run.metrics] == [
        count_flops(replace(SMALL, num_layers=depth), **batch, masked=masked * number)
        for depth, number in zip(depths, heads, strict=True)
    ]


WRONG = [  # in a run of 3 layers and 8 steps
    ({"exit_losses": "3"}, "'3': 3: must be at least 1 and at most 2; LAYER or LAYER:WEIGHT"),
    ({"exit_losses": "1:"}, "'1:': : must be a number"),
    ({"exit_losses": "1:0"}, "'1:0': 0: must be above 0"),
    ({"exit_losses": "1,1:2"}, "names layer 1 twice"),
    ({"exit_losses": "1", "per_layer": "norm,position"}, "not with --per-layer norm,position"),
    ({"depth_schedule": "0@0"}, "'0@0': 0: must be at least 1"),
    ({"depth_schedule": "1@0,2@4"}, "must end with --num-layers 3"),
    ({"depth_schedule": "1@0..3@4"}, "'3@4': changes in jumps only"),
    ({"depth_schedule": "3-1@0"}, "'3-1@0': 3-1: must be the smaller depth first"),
    ({"depth_schedule": "1-@0"}, "'1-@0': : must be a whole number"),
    ({"depth_schedule": "1-2@0"}, "must end with --num-layers 3"),
    ({"depth_schedule": "1@0,3@4", "sharing": "none"}, "--sharing none uses other blocks"),
    (
        {
            "depth_schedule": "5@0,7@1",
            "num_layers": 7,
            "sharing": "cycle-rev:3",
            "per_layer": "scale",
        },
        "runs them in another order there",
    ),
    ({"batch_size": "8@-1"}, "'8@-1': must be VALUE@STEP or VALUE@SHARE%"),
    ({"batch_size": "8@0,,16@5"}, "'': must be VALUE@STEP or VALUE@SHARE%"),
    ({"batch_size": "8@0,16@" + "9" * 5000}, "must be VALUE@STEP"),
]


def test_an_exit_that_no_step_reached_is_null():
    depths = {"depth_schedule": "1@0,3@2", "exit_losses": "2"}
    config = replace(small_config(world_size=1, steps=4), **depths)
    losses = run_ranks(log_exits, 1, config)[0]
    assert losses[:2] == [None, None] and min(losses[2:]) > 0


def log_exits(rank: int, config) -> list[float | None]:
    from albert_ds.training.pretrain import describe_window

    run = open_small_run(config, small_batches(4))
    losses = []
    for _ in range(4):
        norm = take_step(run)
        losses.append(describe_window(run, norm)["exit_loss"])
    return losses


def test_wrong_words_are_refused(data, tmp_path):
    faults = []
    for flags, words in WRONG:
        argv = argv_of(data, tmp_path / "run", **{"num_layers": 3, "steps": 8, **flags})
        flag = "--" + next(iter(flags)).replace("_", "-")
        faults += find_faults(tmp_path, argv, flag, words)
    assert not faults


def hold_out(rank: int, config, samples: list) -> tuple[float, list[float]]:
    """The held-out loss that a step which drew one layer logs; those of each depth."""
    from albert_ds.training.pretrain import evaluate

    run = open_small_run(config, [samples])
    take_step(run)
    run.heldout = [concatenate(samples)]
    logged = evaluate(run)["heldout_mlm_loss"]
    module = run.engine.deepspeed.module
    losses = []
    for depth in (1, 2, 3):
        module.eval().albert.encoder.set_depth(depth)
        with torch.no_grad():
            total = module(**run.heldout[0].tensors)["mlm_loss_sum"]
        losses.append(float(total) / run.heldout[0].masked)
    return logged, losses


def test_held_out_losses_of_drawn_depths_are_those_of_the_greatest():
    samples = small_batches(1)[0]
    model = replace(SMALL, initializer_range=0.2)  # layers change a loss by more than rounding
    config = small_config(world_size=1, steps=9, model=model)
    config = replace(config, depth_schedule="1-2@0,1-3@5")
    assert config.model_at(0).num_layers == 1
    logged, losses = run_ranks(hold_out, 1, config, samples)[0]
    assert logged == pytest.approx(losses[1], rel=1e-6)
    assert min(abs(losses[1] - losses[n]) for n in (0, 2)) > 1e-4


@pytest.mark.parametrize(("exits", "heads"), [(None, (1, 1, 1, 1)), ("1,2:0.5", (1, 2, 2, 3))])
def test_the_time_left_is_that_of_the_depths_to_come(exits, heads, monkeypatch, capsys):
    """Steps of 1, 2, 2 and 3 layers: their FLOPs, and a second for each FLOP of the second step."""
    config = replace(small_config(world_size=1, steps=4), depth_schedule=SCHEDULE)
    config = replace(config, exit_losses=exits)
    row = {"tokens": 32, "squared_lengths": 32**2}
    work = [
        8 * count_flops(config.model.at_depth(depth), **row, masked=5 * number)
        for depth, number in zip((1, 2, 2, 3), heads, strict=True)
    ]
    assert [config.work_of(step) for step in range(5)] == [*accumulate(work, initial=0)]
    clock = iter((0.0, *accumulate(flops / work[1] for flops in work[1:])))
    monkeypatch.setattr(screen.time, "perf_counter", lambda: next(clock))
    shown = screen.Screen(step=0, num_steps=4, work_of=config.work_of)
    shown.advance(1)
    values = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0}
    for step in (2, 3, 4):
        shown.write(step, values)
    ends = [line.partition("left")[2] for line in capsys.readouterr().out.splitlines()]
    to_do = [sum(work[step:]) / work[1] for step in (2, 3, 4)]
    assert [float(end.split()[0]) for end in ends] == [round(seconds) for seconds in to_do]


def step_by_step(rank: int, config, batches: list) -> list[dict]:
    """The weights and moments before the first and after every step, by file and name."""
    run = open_small_run(config, batches)

    def read() -> dict:
        return {(kind, name): x for kind in FILES for name, x in gather(run.engine, kind).items()}

    states = [read()]
    for _ in batches:
        take_step(run)
        states.append(read())
    return states


@pytest.mark.parametrize(
    ("stage", "kind"), [*((stage, "") for stage in (0, 1, 2, 3)), (1, "_adamw"), (1, "_muon")]
)
def test_what_a_layer_that_does_not_run_has_of_its_own_keeps_every_bit(stage, kind):
    """The core runs once, three times and twice; its layers are 1 to 3 of 0 to 4."""
    samples = small_batches(1)[0]
    config = small_config(
        world_size=2, steps=4, model=LOOP, ds_file=f"zero1_fp32{kind}.json", stage=stage
    )
    config = replace(config, depth_schedule="3@0,5@1,4@2,5@3")
    before, *after = run_ranks(step_by_step, 2, config, [samples] * 3)[0]
    for state, running in zip(after, ({0, 1, 4}, {0, 1, 2, 3, 4}, {0, 1, 2, 4}), strict=True):
        moved = {key for key, x in state.items() if not torch.equal(x, before[key])}
        layers = {int(name.split(".")[3]) for _, name in moved if ".own." in name}
        assert layers == running
        before = state


def test_a_depth_is_drawn_from_the_seed_and_the_step():
    config = replace(small_config(world_size=1, steps=3000, model=LOOP), depth_schedule="3-5@0")
    depths = [config.model_at(step).num_layers for step in range(3000)]
    assert [depths.count(depth) for depth in (3, 4, 5)] == pytest.approx([1000] * 3, rel=0.1)
    assert depths == [config.model_at(step).num_layers for step in range(3000)]
    other = replace(config, seed=1)
    agree = sum(other.model_at(step).num_layers == depths[step] for step in range(3000))
    assert agree == pytest.approx(1000, rel=0.15)
    always = replace(config, model=LOOP.at_depth(4), depth_schedule=None)
    assert config.work_of(3000) == pytest.approx(always.work_of(3000))
    pairs = replace(SMALL, sharing="loop:1,2x3,1", num_layers=8)
    assert read_depths(pairs, "4-8@0", 9).values == [(4, 6, 8)]


LOOPED = dict(
    **dict(num_layers=5, sharing="loop:1,1x3,1", per_layer="lora:2,inject", dropout=0.1),
    **dict(depth_schedule="3@0,3-5@2", exit_losses="1:0.5,3", steps=6, save_every=1, keep_last=6),
)


@pytest.mark.nightly
def test_a_looped_run_resumes_to_every_bit_and_shows_what_it_ran(data, tmp_path, capsys):
    whole = run_case(Case(config=LOOPED, cuts=(3,), fault=rewind), data, folder=tmp_path).whole
    sizes = {name: x.numel() for name, x in read_step(whole, 6, WEIGHTS).items()}
    core = sum(size for name, size in sizes.items() if ".attention.1." in name or ".ffn.1." in name)
    total = sum(sizes.values())
    says = f"{total:,}; {total + 2 * core:,} if counted as often as layers use them"
    assert says in capsys.readouterr().out
    steps = [record for record in records(whole) if "samples" in record]
    assert [record["num_layers"] for record in steps[:2]] == [3, 3]
    for record in steps:
        assert record["loss"] == pytest.approx(
            record["mlm_loss"] + record["sop_loss"] + record["exit_loss"]
        )
    done = run_command("export", "--checkpoint", whole, "--output", tmp_path / "hf")
    assert done.code == 2 and done.err.count("\n") == 1
    assert "--per-layer lora:2,inject: " in done.err and "cannot be exported" in done.err
