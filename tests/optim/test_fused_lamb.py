"""DeepSpeed's own LAMB: where it is allowed, what it computes, its way through the trainer.

Its kernel needs CUDA. Here a float64 transcription replaces it, so only the path through the engine
and the checkpoint is tested. It has not been run on a GPU.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from albert_ds.base.errors import UserError
from albert_ds.engine.deepspeed_config import check_device
from tests.distributed import run_ranks
from tests.optim.fused_lamb import DEEPSPEED, RATE, compare_terms, fused_update
from tests.runs import gather, open_small_run, resume, small_batches, small_config, take_step

PARAMS = {"lr": RATE, "betas": [0.9, 0.999], "weight_decay": 0.01, "bias_correction": False}
BATCHES = small_batches(4)


@pytest.mark.parametrize(
    ("stage", "tensor_parallel", "words"),
    [(1, 1, "43 to 52 % off"), (3, 1, "ZeRO stage 3"), (0, 2, "3 % off"), (0, 1, "9 of 9")],
)
def test_it_is_refused_where_it_is_wrong_or_cannot_run(monkeypatch, stage, tensor_parallel, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = {"optimizer": {"type": "FusedLamb"}, "zero_optimization": {"stage": stage}}
    with pytest.raises(UserError, match=words) as caught:
        check_device(Path("ds.json"), config, tensor_parallel=tensor_parallel)
    assert "FusedLamb" in str(caught.value) and "\n" not in str(caught.value)


def test_its_defaults_are_another_optimizer():
    changed = compare_terms()
    for what, (matrices, vectors) in changed.items():
        assert matrices > 0.1 or vectors > 0.1 or "decay" in what or "shards" in what, what
    shards = next(matrices for what, (matrices, _) in changed.items() if "shards" in what)
    assert 0.02 < shards < 0.04  # what the refusal says


class Kernel:
    """In place of the compiled extension; `load` is what DeepSpeed's builder offers."""

    def load(self):
        return self

    def lamb(self, p, out, m, v, g, lr, b1, b2, most, least, eps, scale, step, mode, debias, decay):
        assert (
            type(step) is int and scale == 1 and mode == 1 and lr >= 0 and (b1, b2) == (0.9, 0.999)
        )
        rules = replace(
            DEEPSPEED, eps=eps, min_coeff=least, max_coeff=most, bias_correction=bool(debias)
        )
        before = p.clone()
        fused_update(p, m, v, g, step=step, rules=rules, adapts=True, decay=decay)
        p.copy_(before + (p - before) * (lr / RATE))
        return torch.tensor(1.0)


def train_and_resume(rank: int, folder: Path):
    """Four steps, and two steps, a checkpoint, and two more in an engine built from it."""
    from deepspeed.ops.lamb import fused_lamb

    fused_lamb.FusedLambBuilder = Kernel
    config = small_config(
        world_size=2,
        ds_file="zero0_fp32.json",
        ds_changes={"optimizer": {"type": "FusedLamb", "params": PARAMS}},
        micro_batch_size=4,
        output=str(folder),
    )
    whole, again = (open_small_run(config, BATCHES) for _ in range(2))
    for run in (whole, whole, again, again):
        take_step(run)
    again = resume(again, BATCHES)
    for run in (whole, whole, again, again):
        take_step(run)
    return [gather(run.engine) for run in (whole, again)]


def test_it_goes_through_the_engine_and_a_checkpoint(tmp_path):
    whole, again = run_ranks(train_and_resume, 2, tmp_path)[0]
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())
    assert all(torch.isfinite(weight).all() for weight in whole.values())
