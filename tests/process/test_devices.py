"""A device that is out of memory or broken ends all ranks alike; --deterministic takes effect."""

import json
import os
import subprocess
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.utils.cpp_extension

from albert_ds.engine.engine import _build_optimizer, check_head_width
from albert_ds.errors import UserError
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.process.ending import name_device_failure
from tests.conftest import ROOT, finish, start_ranks, train_command
from tests.finetuning import MODEL

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (OUT_OF_MEMORY, 2),
        ("CUDA error: out of memory", 2),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", 2),
        ("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'", 2),
        ("CUDA error: an illegal memory access was encountered", 5),
        ("CUDA error: unspecified launch failure", 5),
        ("NCCL error: unhandled cuda error. Last error: Cuda failure 719 'launch failure'", 5),
    ],
)
def test_an_error_of_cuda_is_named(message, code):
    found = name_device_failure(RuntimeError(message))
    assert found is not None and found.code == code
    assert "\n" not in found.reason and message[:40] in found.reason


@pytest.mark.parametrize(
    "message",
    ["CUDA error: device-side assert triggered", "shape '[2]' is invalid", "NCCL timeout"],
)
def test_other_errors_are_not_the_devices(message):
    assert name_device_failure(RuntimeError(message)) is None


FAILING = f"""
import os, sys, torch
from albert_ds import cli
from albert_ds.pretraining import loop as train
step = train.run_passes
def fail(run, batch):
    if run.step == 2 and run.mesh.rank == int(os.environ["FAILING"]):
        raise torch.OutOfMemoryError("{OUT_OF_MEMORY}")
    return step(run, batch)
train.run_passes = fail
cli.run(train.main)
"""


@pytest.mark.parametrize(("ranks", "failing"), [(1, 0), (2, 0), (2, 1)])
def test_out_of_memory_ends_all_ranks_with_2(data, tmp_path, monkeypatch, ranks, failing):
    monkeypatch.setenv("FAILING", str(failing))
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    python, _, *flags = train_command(data, tmp_path / "run")
    assert finish(start_ranks([python, str(program), *flags], ranks)) == [2] * ranks
    ending = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert ending["code"] == 2
    assert "--micro-batch-size" in ending["reason"]
    assert "--activation-checkpointing" in ending["reason"]
    assert ranks == 1 or ending["reason"].startswith(f"rank {failing} on ")


@pytest.mark.parametrize(("hidden_size", "is_taken"), [(64, True), (24, False), (4 * 264, False)])
def test_heads_that_cuda_does_not_take_are_refused(monkeypatch, hidden_size, is_taken):
    config = replace(MODEL, hidden_size=hidden_size, num_heads=4 if hidden_size > 24 else 2)
    with torch.device("meta"):
        model = AlbertForPretraining(config)
    check_head_width(model)  # a CPU takes any
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with (
        nullcontext() if is_taken else pytest.raises(UserError, match="multiple of 8, at most 256")
    ):
        check_head_width(model)


def test_fused_lamb_without_a_toolkit_is_refused(monkeypatch):
    from deepspeed.ops.lamb import fused_lamb
    from deepspeed.ops.op_builder.fused_lamb import FusedLambBuilder

    monkeypatch.setattr(fused_lamb, "FusedLambBuilder", FusedLambBuilder)  # as on CUDA
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UserError, match="CUDA toolkit .*CUDA_HOME"):
        _build_optimizer("FusedLamb", [{"params": [weight]}], {"lr": 0.1})


LOOKING = """
import os, torch
from albert_ds import cli
from albert_ds.pretraining import loop as train
def look(*given):
    print("now", torch.are_deterministic_algorithms_enabled())
    return prepare(*given)
prepare, train.prepare = train.prepare, look
def is_available():  # nothing of CUDA starts before this question
    print("before CUDA", os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    return False
torch.cuda.is_available = is_available
cli.run(train.main)
"""


def test_deterministic_algorithms_are_chosen_before_cuda_starts(data, tmp_path):
    program = tmp_path / "looking.py"
    program.write_text(LOOKING)
    python, _, *flags = train_command(data, tmp_path / "run", steps=1)
    command = [python, str(program), *flags, "--deterministic"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[0] == "before CUDA :4096:8"
    assert "now True" in done.stdout
