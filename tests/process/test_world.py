"""Rank and world size are read correctly from each launcher, or refused with a reason."""

import json
from types import SimpleNamespace

import pytest

from albert_ds.errors import UserError
from albert_ds.process.rendezvous import check_kinds, choose_device
from albert_ds.process.world import World, check_memory, find_gpu_grant, read_world, wants_cpu
from tests.conftest import finish, start_ranks, train_command

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def test_no_launcher_is_one_process():
    world = read_world({})
    assert (world.rank, world.local_rank, world.size) == (0, 0, 1)


@pytest.mark.parametrize("environ", [{"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, {"LOCAL_RANK": "1"}])
def test_no_rank_of_several_trains_alone(environ):
    with pytest.raises(UserError, match="RANK is not: use deepspeed or torchrun"):
        read_world(environ)
    assert read_world({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}).size == 1
    assert read_world({**environ, **SRUN}).size == 16


def test_a_model_that_memory_cannot_hold_is_refused(monkeypatch):
    free = SimpleNamespace(available=10 * 10**9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    one = World(rank=0, local_rank=0, size=1, launcher="none")
    two = World(rank=0, local_rank=0, local_size=2, size=2, launcher="torch")
    check_memory(600_000_000, one, "cpu")
    check_memory(2_400_000_000, one, "cuda")
    check_memory(1_200_000_000, two, "cuda")
    for params, world, device in ((700_000_000, one, "cpu"), (1_300_000_000, two, "cuda")):
        with pytest.raises(UserError, match=rf"{params:,} parameters need 1\d GB .* 10 are free"):
            check_memory(params, world, device)


def test_torchrun_and_deepspeed():
    world = read_world(TORCHRUN)
    assert (world.rank, world.local_rank, world.size) == (3, 1, 4)


def test_ranks_of_a_machine_share_its_cores(monkeypatch):
    import torch

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


def test_srun_one_task_a_rank():
    world = read_world(SRUN)
    assert (world.rank, world.local_rank, world.size) == (9, 1, 16)


def test_a_launcher_started_by_each_task_of_slurm_rules():
    two_tasks = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert read_world({**SRUN, **TORCHRUN, **two_tasks}).size == 4


@pytest.mark.parametrize("tasks", ["16", "3", "5"])
def test_a_world_that_slurm_did_not_start_is_refused(tasks):
    environ = {**SRUN, **TORCHRUN, "SLURM_STEP_NUM_TASKS": tasks}
    with pytest.raises(UserError, match=f"WORLD_SIZE=4 but Slurm started {tasks} tasks"):
        read_world(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "-1"),
        ("RANK", "4"),
        ("RANK", "first"),
        ("LOCAL_RANK", ""),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "4.0"),
        ("MASTER_PORT", "http"),
        ("MASTER_PORT", "70000"),
    ],
)
def test_numbers_that_are_none_are_refused(name, value):
    with pytest.raises(UserError, match=name):
        read_world({**TORCHRUN, name: value})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_mpirun_would_be_worlds_of_one_and_is_refused(name):
    with pytest.raises(UserError, match="mpirun"):
        read_world({name: "4"})
    assert read_world({name: "1"}).size == 1


@pytest.mark.parametrize("name", ["LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_description_is_refused(name):
    environ = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(UserError, match=name):
        read_world(environ)


def test_a_batch_script_that_forgot_srun_is_refused():
    with pytest.raises(UserError, match="start it with srun"):
        read_world({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"})


def test_srun_without_a_rendezvous_is_refused():
    environ = {key: value for key, value in SRUN.items() if key != "MASTER_ADDR"}
    with pytest.raises(UserError, match="MASTER_ADDR"):
        read_world(environ)


def test_deepspeed_gets_the_number_of_the_device_not_of_the_task(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as --gpus-per-task=1 grants them
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    world = World(rank=5, local_rank=3, size=8, launcher="srun")
    assert choose_device(world, has_cuda=True) == (torch.device("cuda", 0), "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert choose_device(world, has_cuda=True) == (torch.device("cuda", 3), "3")


@pytest.mark.parametrize(
    ("environ", "grant"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "8"}, "SLURM_GPUS_ON_NODE=8"),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
        ({"SLURM_STEP_GPUS": "0"}, "SLURM_STEP_GPUS=0"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "CUDA_VISIBLE_DEVICES=0"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_SIZE": "2"}, None),  # deepspeed, on a CPU
    ],
)
def test_a_grant_of_gpus_is_seen(environ, grant):
    assert find_gpu_grant(environ) == grant


def test_the_cpu_can_be_chosen():
    assert wants_cpu({"CUDA_VISIBLE_DEVICES": ""}) and wants_cpu({"DS_ACCELERATOR": "cpu"})
    assert not wants_cpu({}) and not wants_cpu({"CUDA_VISIBLE_DEVICES": "0"})


def test_ranks_with_and_without_a_gpu_are_refused():
    for kinds in ([f"cuda GPU-{rank}" for rank in range(4)], ["cpu"] * 4):
        check_kinds(kinds)
    with pytest.raises(UserError, match="ranks 1, 3: no working GPU, but the other ranks have one"):
        check_kinds(["cuda GPU-0", "cpu", "cuda GPU-1", "cpu"])


def test_two_ranks_on_one_gpu_are_refused():
    with pytest.raises(UserError, match="ranks 1, 2 have the same GPU .GPU-7.; allowed: one rank"):
        check_kinds(["cuda GPU-6", "cuda GPU-7", "cuda GPU-7"])


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_job_does_not_train_on_the_cpu(ranks, data, tmp_path, monkeypatch):
    import torch

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
