"""The loop fetches a step's batch before the update of the step before it, and loses no step."""

import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from albert_ds.model.albert import AlbertForPretraining as Albert
from albert_ds.model.even_shapes import SPARE, STEP
from albert_ds.settings.pretrain import read_config
from tests.command import run_command, run_on_rank
from tests.conftest import train_command
from tests.distributed import run_ranks
from tests.runs import open_small_run, small_batches, small_config

BATCHES = small_batches(6, 4)


def train_watched(rank: int, folder: Path) -> dict:
    """What happens, in order, in a whole run, one with damaged data and one that is stopped."""
    return {name: train_one(name, folder / name) for name in ("whole", "damaged", "stopped")}


def train_one(name: str, output: Path) -> tuple:
    from albert_ds.base.errors import DamagedData, Stopped
    from albert_ds.checkpoint.folder import find_newest
    from albert_ds.training import pretrain

    output.mkdir()
    given = dict(batch_size=4, micro_batch_size=4, steps=5, output=str(output))
    config = small_config(world_size=1, **given)
    run = open_small_run(replace(config, save_every=2, eval_every=100, log_every=1), BATCHES)
    request = SimpleNamespace(reason=None)
    events = []
    ending = None

    def damage(batches):
        yield from islice(batches, 2)
        raise DamagedData("a shard")

    def watch(what, step):
        def watched(*given, **options):
            events.append(f"{what} {run.step}")
            if name == "stopped" and events[-1] == "passes 1":
                request.reason = "asked"
            return step(*given, **options)

        return watched

    if name == "damaged":
        run.batches = damage(run.batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "evaluate", lambda run: {})
        for what, of_loop in (("fetch", "next_batch"), ("passes", "run_passes"), ("update",) * 2):
            patch.setattr(pretrain, of_loop, watch(what, getattr(pretrain, of_loop)))
        try:
            pretrain.train(run, request)
        except (DamagedData, Stopped) as caught:
            ending = str(caught)
    for thread in threading.enumerate():  # python itself waits for this one
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    return events, ending, run.step, find_newest(output)[0].name


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_ranks(train_watched, 1, tmp_path_factory.mktemp("runs"))[0]


def test_the_next_batch_is_fetched_before_the_update(outcomes):
    events, ending, step, newest = outcomes["whole"]
    assert events[:7] == [
        *("fetch 0", "passes 0", "fetch 0", "update 0"),
        *("passes 1", "fetch 1", "update 1"),
    ]
    assert events[-4:] == ["fetch 3", "update 3", "passes 4", "update 4"]  # none beyond the last
    assert (ending, step, newest) == (None, 5, "step-00000005")


def test_damaged_data_loses_no_step_before_it(outcomes):
    events, ending, step, newest = outcomes["damaged"]
    assert "a shard" in ending
    assert (step, newest) == (2, "step-00000002")


def test_a_stop_during_the_passes_ends_after_their_step(outcomes):
    events, ending, step, newest = outcomes["stopped"]
    assert ending == "stopped after step 2 of 5: asked"
    assert (step, newest) == (2, "step-00000002")


def test_stdout_is_the_trainers_own_and_begins_with_the_facts(data, tmp_path):
    """DeepSpeed's form of bf16 prints lines about memory while it is built."""
    given = dict(steps=1, tensor_parallel=2, deepspeed_config="ds_configs/zero1_bf16.json")
    words = train_command(data, tmp_path / "run", **given)[2:]
    done, _ = run_ranks(run_on_rank, 2, ["train", *words])
    assert done.code == 0, done.err
    assert "done: " in done.out and "MA " not in done.out and "bf16_optimizer" not in done.out
    config = read_config(words, world_size=2)[0].model
    shapes = (config, replace(config, sharing="none"))
    unique, effective = (sum(p.numel() for p in Albert(c).parameters()) for c in shapes)
    for fact in (
        f"  parameters  {unique:,}; {effective:,} if counted",
        " on 1 node = 2 tensor-parallel x 1 data-parallel; ZeRO-1\n",
        "  precision   bf16, with fp32 master weights\n",
        " 8 samples a step = micro-batch 2 x 1 data-parallel rank x accumulation 4\n",
    ):
        assert fact in done.out, (fact, done.out)


def train_listening(rank: int, words: list) -> set[tuple[bool, int]]:
    """Whether a micro-batch was trained on, and what its tokens are beyond whole steps."""
    rests = set()
    compute = Albert.forward

    def listen(self, input_ids, *given, **more):
        rests.add((self.training, len(input_ids) % STEP))
        return compute(self, input_ids, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Albert, "forward", listen)
        done = run_command(*words)
    assert done.code == 0, done.err
    return rests


@pytest.mark.parametrize(("precision", "tensor_parallel"), [("bf16", 1), ("fp32", 1), ("bf16", 2)])
def test_micro_batches_have_few_shapes_in_bf16_on_a_cpu(data, tmp_path, precision, tensor_parallel):
    """Those of the held-out set too. Ranks of tensor parallelism would send what is added."""
    mode = dict(
        tensor_parallel=tensor_parallel, deepspeed_config=f"ds_configs/zero1_{precision}.json"
    )
    words = train_command(data, tmp_path / "run", steps=2, eval_every=2, num_workers=0, **mode)[2:]
    rests = run_ranks(train_listening, tensor_parallel, ["train", *words])[0]
    if precision == "bf16" and tensor_parallel == 1:
        assert rests == {(True, SPARE), (False, SPARE)}
    else:
        assert len(rests) > 4
