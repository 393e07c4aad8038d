"""Rank and world size are read correctly from each launcher, or refused with a reason.

What a device cannot do is refused; --deterministic takes effect before CUDA starts.
"""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.utils.cpp_extension

from albert_ds.base.errors import UserError
from albert_ds.engine.engine import check_head_width
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.optim.fused_lamb import build_fused_lamb
from albert_ds.process.rendezvous import check_kinds, choose_device, order_kernels
from albert_ds.process.world import World, check_memory, find_gpu_grant, read_world, wants_cpu
from tests.conftest import finish, start_ranks, train_command
from tests.distributed import run_ranks
from tests.finetuning import MODEL

MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", **MEETING}
SRUN = {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_ID": "0", **MEETING}
SRUN |= {"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
TWO_TASKS = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
# Variables -> rank, local rank and number of ranks.
WORLDS = {
    "no launcher": ({}, (0, 0, 1)),
    "one process": ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 0, 1)),
    "mpirun of one": ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}, (0, 0, 1)),
    "torchrun, deepspeed": (TORCHRUN, (3, 1, 4)),
    "srun, a task a rank": (SRUN, (9, 1, 16)),
    "srun with a rest of torchrun's": ({"LOCAL_RANK": "1", **SRUN}, (9, 1, 16)),
    "a launcher started by each task of srun": ({**SRUN, **TORCHRUN, **TWO_TASKS}, (3, 1, 4)),
}


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


# What no rank may train with -> words of the refusal.
REFUSED = [
    *(({**TORCHRUN, "RANK": value}, "RANK") for value in ("-1", "4", "first")),
    *(({**TORCHRUN, "WORLD_SIZE": value}, "WORLD_SIZE") for value in ("0", "4.0")),
    *(({**TORCHRUN, "MASTER_PORT": value}, "MASTER_PORT") for value in ("http", "70000")),
    ({**TORCHRUN, "LOCAL_RANK": ""}, "LOCAL_RANK"),
    # Half a description.
    *((without(TORCHRUN, name), name) for name in TORCHRUN if name != "RANK"),
    *(
        (environ, "RANK is not: use deepspeed or torchrun")
        for environ in ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, {"LOCAL_RANK": "1"})
    ),
    (without(SRUN, "MASTER_ADDR"), "MASTER_ADDR"),
    # Several processes that would be worlds of one.
    *(({name: "4"}, "mpirun") for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")),
    ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, "start it with srun"),
    ({"DS_ACCELERATOR": "xyz"}, "DS_ACCELERATOR=xyz in the environment: must be cpu or cuda"),
    *(
        (
            {**SRUN, **TORCHRUN, "SLURM_STEP_NUM_TASKS": tasks},
            f"WORLD_SIZE=4 but Slurm started {tasks} tasks",
        )
        for tasks in ("16", "3", "5")
    ),
]


def test_every_launcher_tells_rank_and_size():
    for name, (environ, expected) in WORLDS.items():
        world = read_world(environ)
        assert (world.rank, world.local_rank, world.size) == expected, name


def test_a_world_that_contradicts_itself_is_refused():
    for environ, words in REFUSED:
        with pytest.raises(UserError, match=words):
            print(environ, read_world(environ))


def test_a_model_that_memory_cannot_hold_is_refused(monkeypatch, capsys):
    free = SimpleNamespace(available=10 * 10**9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    one = World(rank=0, local_rank=0, size=1, launcher="none")
    two = World(rank=0, local_rank=0, local_size=2, size=2, launcher="torch")
    check_memory(600_000_000, one, "cpu")
    check_memory(2_400_000_000, one, "cuda")
    check_memory(1_200_000_000, two, "cuda")
    assert not capsys.readouterr().err
    for params, world, needed in ((700_000_000, one, 11), (1_300_000_000, two, 21)):
        words = f"{params:,} parameters need {needed} GB of this machine's memory, 10 are free"
        with pytest.raises(UserError, match=words):
            check_memory(params, world, "cpu")
    check_memory(300_000_000, one, "cpu", teacher=1_200_000_000)
    words = "600,000,000 parameters and the 1,200,000,000 of --teacher need 14 GB of this machine's"
    with pytest.raises(UserError, match=words):
        check_memory(600_000_000, one, "cpu", teacher=1_200_000_000)
    check_memory(1_200_000_000, two, "cuda", teacher=1_200_000_000)  # one after the other
    assert not capsys.readouterr().err
    check_memory(1_300_000_000, two, "cuda")  # its memory may grow with use
    assert "warning: the model's 1,300,000,000 parameters need 10 GB" in capsys.readouterr().err


def test_ranks_of_a_machine_share_its_cores(monkeypatch):
    used = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        for own in (False, True):  # what the user set stays
            monkeypatch.setenv("OMP_NUM_THREADS", "2") if own else monkeypatch.delenv(
                "OMP_NUM_THREADS", raising=False
            )
            used.clear()
            choose_device(read_world({**TORCHRUN, name: "2"}), has_cuda=False)
            assert used == ([] if own else [4])


def test_deepspeed_gets_the_number_of_the_device_not_of_the_task(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as --gpus-per-task=1 grants them
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    world = World(rank=5, local_rank=3, size=8, launcher="srun")
    assert choose_device(world, has_cuda=True) == (torch.device("cuda", 0), "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert choose_device(world, has_cuda=True) == (torch.device("cuda", 3), "3")
    # Batches of text differ in size; without it torch may reserve twice the memory.
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_one_hardware_queue_with_tensor_parallelism_only(monkeypatch):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    order_kernels(1)
    assert name not in os.environ
    order_kernels(2)
    assert os.environ.pop(name) == "1"


def test_a_grant_of_gpus_is_seen_and_the_cpu_can_be_chosen():
    for environ, grant in (
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "8"}, "SLURM_GPUS_ON_NODE=8"),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
        ({"SLURM_STEP_GPUS": "0"}, "SLURM_STEP_GPUS=0"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES=0"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_SIZE": "2"}, None),  # deepspeed, on a CPU
    ):
        assert find_gpu_grant(environ) == grant, environ
    assert wants_cpu({"CUDA_VISIBLE_DEVICES": ""}) and wants_cpu({"DS_ACCELERATOR": "cpu"})
    assert not wants_cpu({}) and not wants_cpu({"CUDA_VISIBLE_DEVICES": "0"})


def test_every_rank_has_a_gpu_of_its_own_or_none_has_one():
    for kinds in ([f"cuda GPU-{rank}" for rank in range(4)], ["cpu"] * 4):
        check_kinds(kinds)
    for kinds, words in (
        (
            ["cuda GPU-0", "cpu", "cuda GPU-1", "cpu"],
            "ranks 1, 3: no working GPU, but the other ranks have one",
        ),
        (
            ["cuda GPU-6", "cuda GPU-7", "cuda GPU-7"],
            "ranks 1, 2 have the same GPU .GPU-7.; allowed: one rank",
        ),
    ):
        with pytest.raises(UserError, match=words):
            check_kinds(kinds)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_job_does_not_train_on_the_cpu(ranks, data, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a working GPU")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    assert finish(start_ranks(train_command(data, run, steps=1), ranks)) == [2] * ranks
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 2
    assert "SLURM_GPUS_ON_NODE=8" in ending["reason"] and "DS_ACCELERATOR=cpu" in ending["reason"]


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
        build_fused_lamb([("weight", weight)], lr=0.1)


def test_a_header_that_the_toolkit_lacks_is_named(monkeypatch):
    """On one line, though a failed build's text is all that was compiled."""
    from deepspeed.ops.lamb import fused_lamb

    class Builder:
        def load(self):
            said = "a.h:5:10: fatal error: cusparse.h: No such file\nninja: build stopped"
            raise RuntimeError(f"Error building extension 'fused_lamb': [1/3] c++ a.cpp\n{said}")

    monkeypatch.setattr(fused_lamb, "FusedLambBuilder", Builder)
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UserError, match="CUDA toolkit .*error: cusparse.h") as caught:
        build_fused_lamb([("weight", weight)], lr=0.1)
    assert "\n" not in str(caught.value)


def choose(rank: int) -> tuple:
    """What stands in the environment at the first question about CUDA; what is chosen."""
    from albert_ds.training.trainer import TrainerProcess

    seen = []
    torch.cuda.is_available = lambda: seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    with TrainerProcess(["--output", "unused"]) as process:
        process.read_world()
        given = dict(max_hours=None, tensor_parallel=1, deterministic=True, timeout_minutes=1)
        process.connect(SimpleNamespace(**given), {})
        chosen = torch.are_deterministic_algorithms_enabled()
    return seen[0], chosen, process.code


def test_deterministic_algorithms_are_chosen_before_cuda_starts():
    assert run_ranks(choose, 1) == [(":4096:8", True, 0)]
