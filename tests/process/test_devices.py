"""What a device cannot do is refused; --deterministic takes effect before CUDA starts."""

import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.utils.cpp_extension

from albert_ds.engine.engine import build_optimizer, check_head_width
from albert_ds.errors import UserError
from albert_ds.model.albert import AlbertForPretraining
from tests.distributed import run_ranks
from tests.finetuning import MODEL


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
        build_optimizer("FusedLamb", [{"params": [weight]}], {"lr": 0.1})


def test_a_header_that_the_toolkit_lacks_is_named(monkeypatch):
    """On one line, though a failed build's text is all that was compiled."""
    from deepspeed.ops.lamb import fused_lamb

    class Builder:
        def load(self):
            said = "a.h:5:10: fatal error: cusparse.h: No such file\nninja: build stopped"
            raise RuntimeError(f"Error building extension 'fused_lamb': [1/3] c++ a.cpp\n{said}")

    monkeypatch.setattr(fused_lamb, "FusedLambBuilder", Builder)
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UserError, match="CUDA toolkit .*error: cusparse.h") as found:
        build_optimizer("FusedLamb", [{"params": [weight]}], {"lr": 0.1})
    assert "\n" not in str(found.value)


def choose(rank: int) -> tuple:
    """What stands in the environment at the first question about CUDA; what is chosen."""
    from albert_ds.process.trainer import TrainerProcess

    seen = []
    torch.cuda.is_available = lambda: seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    with TrainerProcess(["--output", "unused"]) as process:
        process.read_world()
        rest = dict(max_hours=None, tensor_parallel=1, deterministic=True)
        process.connect({}, timeout_minutes=1, **rest)
        chosen = torch.are_deterministic_algorithms_enabled()
    return seen[0], chosen, process.code


def test_deterministic_algorithms_are_chosen_before_cuda_starts():
    assert run_ranks(choose, 1) == [(":4096:8", True, 0)]
