"""The trainers' CUDA path, run on a fake device that is host memory.

It finds operators that mix devices, wrong arguments of flash attention, collectives of host tensors
over NCCL, and what makes the host wait for the device. It cannot find races between streams, wrong
kernels, or anything about speed.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from albert_ds.data.shards import open_shards
from tests.conftest import ROOT, finish, start_ranks, train_command
from tests.fake_cuda.build import find_compiler
from tests.finetuning import flags, write_checkpoint, write_rte

# The places that may make the host wait, and how often in a step. A step here has four
# micro-batches, so a place that waits at each of them is over its bound. ZeRO-3 is not held to
# this: DeepSpeed waits for its streams at each micro-batch there.
UTILS = "site-packages/deepspeed/runtime/utils.py"
WAITS = {
    # The norm goes into metrics.jsonl, and one that is not finite skips the step.
    "albert_ds/runtime/engine.py:take_step": 1,
    # DeepSpeed reads the norm of both parameter groups and their sum by itself.
    f"{UTILS}:mask_nan_or_inf_with_val_inplace": 2,
    f"{UTILS}:is_invalid_grad_norm": 3,
    f"{UTILS}:clip_tensors_by_global_norm": 1,
    # ZeRO-2: whether a gradient is finite.
    "site-packages/deepspeed/runtime/zero/stage_1_and_2.py:has_overflow": 1,
}


@pytest.fixture(scope="module")
def fake_cuda():
    """The environment of a process that sees one fake device."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has the real operators of CUDA")
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    command = [sys.executable, "-c", "from tests.fake_cuda.build import build; print(build())"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_CUDA_FOLDER", done.stdout.split()[-1])
        patch.setenv("FAKE_CUDA_DEVICES", "1")  # as --gpus-per-task=1 grants them
        patch.delenv("DS_ACCELERATOR", raising=False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield


def run_on_cuda(report: Path, program: str, argv: list[str], ranks: int = 1) -> dict:
    """Run a trainer on `ranks` fake devices to its end; returns rank 0's report."""
    command = [sys.executable, "-m", "tests.fake_cuda.run", str(report), program, *argv]
    assert finish(start_ranks(command, ranks)) == [0] * ranks
    return json.loads(report.read_text())


def check(report: dict, steps: int) -> None:
    """No operator mixes devices, and no step waits for the device more than it may."""
    assert report["mixed"] == {}
    assert len(report["steps"]) == steps
    for step in report["steps"]:
        found: dict[str, int] = {}
        for event, count in step.items():
            place = event.partition(" at ")[2]
            found[place] = found.get(place, 0) + count
        assert {place: n for place, n in found.items() if n > WAITS.get(place, 0)} == {}


def test_pretraining_and_resuming(fake_cuda, data, tmp_path):
    how = dict(deepspeed_config="ds_configs/zero1_bf16.json", save_every=4)
    for steps, trained in ((4, 4), (6, 2)):
        argv = train_command(data, tmp_path / "run", steps=steps, **how)[2:]
        report = run_on_cuda(tmp_path / f"report-{steps}", "albert_ds.train", argv)
        check(report, trained)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["num_workers"] == 2


def test_tensor_parallel_ranks_that_see_one_device_each(fake_cuda, data, tmp_path):
    how = dict(deepspeed_config="ds_configs/zero2_bf16.json", tensor_parallel=2, steps=4)
    argv = train_command(data, tmp_path / "run", **how)[2:]
    report = run_on_cuda(tmp_path / "report", "albert_ds.train", argv, ranks=2)
    check(report, 4)


def test_fine_tuning(fake_cuda, data, tmp_path):
    vocab = open_shards(data, "train").vocab
    checkpoint = write_checkpoint(tmp_path / "pretrained", vocab, vocab_size=vocab.size)
    how = dict(deepspeed_config="ds_configs/zero1_bf16_adamw.json", micro_batch_size=2)
    argv = flags("glue/rte", write_rte(tmp_path / "RTE"), checkpoint, tmp_path / "out", **how)
    report = run_on_cuda(tmp_path / "report", "albert_ds.finetune", argv)
    check(report, 4)
