"""A non-finite gradient changes nothing on any rank; many in a row end the run.

What either trainer saves while steps are skipped, and how it ends then.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from albert_ds.checkpoint.folder import FILES
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.settings.pretrain import read_config
from tests.batches import concatenate
from tests.conftest import finish, start_ranks, train_command
from tests.distributed import run_ranks
from tests.finetuning import flags, open_run
from tests.models import write_run
from tests.runs import gather, join, open_small_run, small_batches, small_config, take_step

MODES = [("fp32", stage) for stage in (0, 1, 2, 3)]
MODES += [(kind, stage) for kind in ("bf16", "fp16") for stage in (1, 2, 3)]
LEAST = {"fp16": {"fp16": {"initial_scale_power": 0, "hysteresis": 1}}}  # of the loss's scale
BATCHES = small_batches(4)
POISON = {1: float("nan"), 2: float("inf")}  # step -> factor of one rank's loss


def poison_steps(rank: int, configs):
    """Steps with a good, a NaN, an infinite and a good gradient: what each reported and left."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # any CPU can compute it, if slowly
    reports = []
    for config in configs:
        run = open_small_run(config, BATCHES)
        head = run.engine.deepspeed.module.mlm_head
        report = []
        for step in range(len(BATCHES)):
            handle = None
            if step in POISON and rank == 1:  # only this rank's gradient, in every micro-batch
                handle = head.register_forward_hook(
                    lambda module, inputs, out, factor=POISON[step]: (out[0] * factor, *out[1:])
                )
            norm = take_step(run)
            if handle:
                handle.remove()
            held = {kind: gather(run.engine, kind) for kind in FILES}
            report.append((norm, run.updates, run.skipped_in_a_row, held))
        run.window.reset()
        reports.append(report)
    return reports


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all():
    configs = [
        small_config(
            world_size=2, ds_file=f"zero1_{kind}.json", stage=stage, ds_changes=LEAST.get(kind)
        )
        for kind, stage in MODES
    ]
    by_rank = run_ranks(poison_steps, 2, configs)
    for mode, here, there in zip(MODES, *by_rank, strict=True):
        assert [report[1:3] for report in here] == [report[1:3] for report in there], mode
        assert [report[1] for report in here] == [1, 1, 1, 2], mode  # updates applied
        assert [report[2] for report in here] == [0, 1, 2, 0], mode  # skipped in a row
        held = [report[3] for report in here]
        for kind in FILES:
            for name, good in held[0][kind].items():
                assert torch.isfinite(good).all()
                assert torch.equal(held[1][kind][name], good), (mode, kind, name)
                assert torch.equal(held[2][kind][name], good), (mode, kind, name)
        moved = [
            not torch.equal(held[3]["weights.safetensors"][name], good)
            for name, good in held[0]["weights.safetensors"].items()
        ]
        assert all(moved), mode
        assert torch.isfinite(torch.tensor(here[3][0]))


@pytest.fixture
def spoilt_weights(data, tmp_path):
    """A run of `train_command`'s model with one weight so large that sums overflow."""
    argv = train_command(data, tmp_path / "unused")[2:]
    model = AlbertForPretraining(read_config(argv, world_size=2)[0].model)
    model.albert.encoder.ffn[0].feed_forward.up.bias.data[0] = 3e38
    return write_run(tmp_path / "spoilt", model)


def test_a_run_that_diverges_ends_with_4_and_names_what_is_good(data, tmp_path, spoilt_weights):
    run = tmp_path / "run"
    rhythm = dict(steps=50, save_every=4, eval_every=50, micro_batch_size=4)
    command = train_command(data, run, init_from=spoilt_weights, **rhythm)
    assert finish(start_ranks(command, 2)) == [4, 4]
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 4 and ending["step"] == 20
    assert "20 steps in a row" in ending["reason"]
    # Nothing was saved while steps were skipped: a checkpoint is one that training went on from.
    assert ending["reason"].endswith("last good checkpoint: none")
    assert not list((run / "checkpoints").glob("step-*"))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["skipped_steps"] for record in records] == [1] * 19  # the 20th ended it


def evaluate_leak(rank: int) -> list[str]:
    """Messages of the held-out evaluation for a model that always knows the order, never, and
    always for few pairs.
    """
    import contextlib
    import io

    from albert_ds.model.albert import name_outputs
    from albert_ds.training.heldout import evaluate

    device, mesh = join(1)
    batch = concatenate(BATCHES[0])
    model = torch.nn.Module()
    said = []
    for right, times in ((batch.pairs, 30), (0, 30), (batch.pairs, 1)):
        outputs = {name: torch.tensor(float(right), device=device) for name in name_outputs()}
        model.forward = lambda outputs=outputs, **_: outputs
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            evaluate(model, [batch] * times, mesh, device, "sop")
        said.append(printed.getvalue())
    return said


def test_an_accuracy_that_only_a_leak_gives_is_warned_of():
    leaking, honest, lucky = run_ranks(evaluate_leak, 1)[0]
    assert "held-out SOP accuracy 1.000" in leaking and "leak" in leaking
    assert honest == lucky == ""


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


def skip(run, steps: set, keys: tuple[str, ...], is_overflow: bool) -> None:
    """Make the loss of these steps NaN, or their gradient alone infinite."""

    def change(module, inputs, outputs):
        if not module.training or run.step not in steps:
            return outputs
        if is_overflow:
            outputs[keys[0]].register_hook(lambda gradient: gradient * float("inf"))
            return outputs
        return {**outputs, **{key: outputs[key] * float("nan") for key in keys}}

    run.engine.deepspeed.module.register_forward_hook(change)


class Request:
    def __init__(self, run, stop_after: int):
        self._run, self._stop_after = run, stop_after

    @property
    def reason(self) -> str | None:
        return "asked" if self._run.step >= self._stop_after else None


def pretrain(scenario: Scenario, folder: Path, is_overflow: bool, common: list) -> None:
    from unittest.mock import patch

    from albert_ds.training import pretrain as loop

    config = small_config(
        world_size=1, steps=scenario.steps, batch_size=4, output=str(folder / "run")
    )
    config = replace(config, save_every=1, log_every=1, keep_last=2)
    config.run.mkdir(parents=True)
    samples = small_batches(3, 4)
    run = open_small_run(config, [])
    run.batches = itertools.cycle(open_small_run(config, samples).batches)
    skip(run, scenario.skipped, ("loss", "mlm_loss_sum"), is_overflow)
    with patch.object(loop, "evaluate", return_value={}):
        loop.train(run, Request(run, scenario.stop_after))


def fine_tune(scenario: Scenario, folder: Path, is_overflow: bool, common: list) -> None:
    from albert_ds.training import finetune as loop
    from albert_ds.training.metrics import Metrics

    device, mesh = join(1)
    given = {"patience": scenario.patience} if scenario.patience else {}
    rhythm = dict(steps=scenario.steps, eval_every=1, save_every=1)
    run = open_run(flags(*common, folder / "run", **rhythm, **given), device, mesh)
    skip(run, scenario.skipped, ("loss_sum",), is_overflow)
    metrics = Metrics(run.config.run, mesh, run.step, num_steps=scenario.steps, wandb=False)
    loop.train(run, metrics, Request(run, scenario.stop_after))


def train_all(rank: int, trainer: str, folder: Path, common: list) -> dict[str, str]:
    """How each scenario ended."""
    from albert_ds.base.errors import Diverged, Stopped

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
    for name, outcome in endings.items():
        ending = SCENARIOS[name].ending
        left = SCENARIOS[name].left[trainer]
        # A divergence names the last good checkpoint.
        is_divergence = ending.startswith("step-")
        assert outcome.startswith("Diverged" if is_divergence else ending), (name, outcome)
        assert not is_divergence or outcome.endswith(ending), (name, outcome)
        kept = sorted((tmp_path / name / "run").glob("checkpoints/step-*"))
        assert [int(path.name[5:]) for path in kept] == left, name
