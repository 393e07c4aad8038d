"""The loop fetches a step's batch before the update of the step before it, and loses no step."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command import run_on_rank
from tests.conftest import train_command
from tests.distributed import run_ranks
from tests.training import open_small_run, small_batches, small_config

BATCHES = small_batches(6, 4)


def train_watched(rank: int, folder: str) -> dict:
    """What happens, in order, in a whole run, one with damaged data and one that is stopped."""
    from albert_ds.checkpoint.gather import find_newest
    from albert_ds.errors import DamagedData, Stopped
    from albert_ds.pretraining import loop as train

    found = {}
    for name in ("whole", "damaged", "stopped"):
        output = Path(folder) / name
        output.mkdir()
        config = small_config(
            world_size=1, batch_size=4, micro_batch_size=4, steps=5, output=str(output)
        )
        config = replace(config, save_every=2, eval_every=100, log_every=1)
        run = open_small_run(config, BATCHES)
        request, events = SimpleNamespace(reason=None), []

        def damage(batches):
            for number, batch in enumerate(batches):
                if number == 2:
                    raise DamagedData("a shard")
                yield batch

        def watch(what, step, request=request, events=events, run=run):
            def watched(*given, **how):
                events.append(f"{what} {run.step}")
                if events[-1] == "stop at passes 1":
                    request.reason = "asked"
                return step(*given, **how)

            return watched

        if name == "damaged":
            run.batches = damage(run.batches)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "evaluate", lambda run: {})
            label = "stop at passes" if name == "stopped" else "passes"
            for what, step in (
                ("fetch", "next_batch"),
                (label, "run_passes"),
                ("update", "update"),
            ):
                patch.setattr(train, step, watch(what, getattr(train, step)))
            try:
                train.train(run, request)
                ending = None
            except (DamagedData, Stopped) as caught:
                ending = str(caught)
        for thread in threading.enumerate():  # python itself waits for this one
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        found[name] = (events, ending, run.step, find_newest(output)[0].name)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(train_watched, 1, str(tmp_path_factory.mktemp("runs")))[0]


def test_the_next_batch_is_fetched_before_the_update(found):
    events, ending, step, newest = found["whole"]
    assert events[:7] == [
        *("fetch 0", "passes 0", "fetch 0", "update 0"),
        *("passes 1", "fetch 1", "update 1"),
    ]
    assert events[-4:] == ["fetch 3", "update 3", "passes 4", "update 4"]  # none beyond the last
    assert (ending, step, newest) == (None, 5, "step-00000005")


def test_damaged_data_loses_no_step_before_it(found):
    events, ending, step, newest = found["damaged"]
    assert "a shard" in ending
    assert (step, newest) == (2, "step-00000002")


def test_a_stop_during_the_passes_ends_after_their_step(found):
    events, ending, step, newest = found["stopped"]
    assert ending == "stopped after step 2 of 5: asked"
    assert (step, newest) == (2, "step-00000002")


def test_stdout_is_the_trainers_own(data, tmp_path):
    """DeepSpeed's form of bf16 prints lines about memory while it is built."""
    words = train_command(
        data, tmp_path / "run", steps=1, deepspeed_config="ds_configs/zero1_bf16.json"
    )[2:]
    (done,) = run_ranks(run_on_rank, 1, ["train", *words])
    assert done.code == 0, done.err
    assert "done: " in done.out and "MA " not in done.out and "bf16_optimizer" not in done.out
