"""Steps that are skipped in a row: what either trainer saves then, and how it ends."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed import run_ranks
from tests.finetuning import flags, open_run
from tests.training import join, open_small_run, small_batches, small_config


class Scenario(NamedTuple):
    """What happens in a run that saves after every step, and what becomes of it."""

    steps: int
    skipped: set  # steps, counted from 0
    ending: str
    left: dict  # steps of the checkpoints that are left, of pretraining and fine-tuning
    stop_after: int = 10**9  # a stop is asked for after this step
    patience: int | None = None  # of fine-tuning


PRETRAINING, FINE_TUNING = "pretraining", "fine-tuning"
SCENARIOS = {
    "a stop waits for a step that was not skipped": Scenario(
        *(9, {2, 3}, "Stopped: stopped after step 5 of 9"),
        {PRETRAINING: [2, 5], FINE_TUNING: [5]},
        stop_after=3,
    ),
    "a stop does not save what has diverged": Scenario(
        *(99, {*range(2, 99)}, "step-00000002"),
        {PRETRAINING: [1, 2], FINE_TUNING: [2]},
        stop_after=3,
    ),
    "diverged just before the end": Scenario(
        *(6, {4, 5}, "step-00000004"), {PRETRAINING: [3, 4], FINE_TUNING: [4]}
    ),
    "patience is no good end of a divergence": Scenario(
        *(99, {*range(2, 99)}, "step-00000002"), {FINE_TUNING: [2]}, patience=3
    ),
    "an overflow of the last step's gradient alone is no divergence": Scenario(
        *(6, {5}, "all steps done"), {PRETRAINING: [5, 6], FINE_TUNING: [5]}
    ),
}


def skip(run, steps: set, key: str, is_overflow: bool) -> None:
    """Make the loss of these steps NaN, or their gradient alone infinite."""

    def change(module, inputs, outputs):
        if not module.training or run.step not in steps:
            return outputs
        if is_overflow:
            outputs[key].register_hook(lambda gradient: gradient * float("inf"))
            return outputs
        return {**outputs, key: outputs[key] * float("nan")}

    run.engine.deepspeed.module.register_forward_hook(change)


class Request:
    def __init__(self, run, stop_after: int):
        self._run, self._stop_after = run, stop_after

    @property
    def reason(self) -> str | None:
        return "asked" if self._run.step >= self._stop_after else None


def pretrain(scenario: Scenario, folder: Path, is_overflow: bool, common: list) -> None:
    from unittest.mock import patch

    from albert_ds.pretraining import loop

    config = small_config(
        world_size=1, steps=scenario.steps, batch_size=4, output=str(folder / "run")
    )
    config = replace(config, save_every=1, log_every=1, keep_last=2)
    config.run.mkdir(parents=True)
    samples = small_batches(3, 4)
    run = open_small_run(config, [])
    run.batches = itertools.cycle(open_small_run(config, samples).batches)
    skip(run, scenario.skipped, "mlm_loss_sum", is_overflow)
    with patch.object(loop, "evaluate", return_value={}):
        loop.train(run, Request(run, scenario.stop_after))


def fine_tune(scenario: Scenario, folder: Path, is_overflow: bool, common: list) -> None:
    from albert_ds.finetuning import loop
    from albert_ds.report.metrics import Metrics

    device, mesh, _ = join(1)
    given = {"patience": scenario.patience} if scenario.patience else {}
    rhythm = dict(steps=scenario.steps, eval_every=1, save_every=1)
    run = open_run(flags(*common, folder / "run", **rhythm, **given), device, mesh)
    skip(run, scenario.skipped, "loss_sum", is_overflow)
    metrics = Metrics(run.config.run, mesh, run.step, num_steps=scenario.steps, wandb=False)
    loop.train(run, metrics, Request(run, scenario.stop_after))


def train_all(rank: int, trainer: str, folder: Path, common: list) -> dict[str, str]:
    """How each scenario ended."""
    from albert_ds.errors import Diverged, Stopped

    endings = {}
    train = {PRETRAINING: pretrain, FINE_TUNING: fine_tune}[trainer]
    for name, scenario in SCENARIOS.items():
        if trainer not in scenario.left:
            continue
        try:
            train(scenario, folder / name, "overflow" in name, common)
            endings[name] = "all steps done"
        except (Stopped, Diverged) as caught:
            endings[name] = f"{type(caught).__name__}: {caught}"
    return endings


@pytest.mark.parametrize("trainer", [PRETRAINING, FINE_TUNING])
def test_steps_that_are_skipped_in_a_row(trainer, cola, checkpoint, tmp_path):
    common = ["glue/cola", cola, checkpoint]
    endings = run_ranks(train_all, 1, trainer, tmp_path, common)[0]
    for name, found in endings.items():
        ending, left = SCENARIOS[name].ending, SCENARIOS[name].left[trainer]
        # A divergence names the last good checkpoint.
        is_divergence = ending.startswith("step-")
        assert found.startswith("Diverged" if is_divergence else ending), (name, found)
        assert not is_divergence or found.endswith(ending), (name, found)
        kept = sorted((tmp_path / name / "run").glob("checkpoints/step-*"))
        assert [int(path.name[5:]) for path in kept] == left, name
