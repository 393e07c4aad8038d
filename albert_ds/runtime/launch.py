"""From a launcher's environment to a process group: the one place that reads `os.environ`.

`deepspeed` and `torchrun` set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_*; `srun` sets SLURM_*, which
DeepSpeed never reads: left to itself it asks MPI, and N tasks that find no matching PMI each train
alone as rank 0 of a world of one. So the world is read here and MPI discovery stays off.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

from albert_ds.errors import UserError

TORCH_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Who this process is among those its launcher started."""

    rank: int
    local_rank: int
    size: int
    launcher: str


def read_world(environ=os.environ) -> World:
    """Read the world from the launcher's variables; raise UserError where they contradict."""
    if "RANK" in environ:
        missing = [name for name in TORCH_NAMES if name not in environ]
        if missing:
            raise UserError(
                f"RANK is set but {', '.join(missing)} is not: use deepspeed or torchrun"
            )
        return World(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            size=int(environ["WORLD_SIZE"]),
            launcher="torch",
        )
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")))
    if tasks == 1:
        return World(rank=0, local_rank=0, size=1, launcher="none")
    if "SLURM_STEP_ID" not in environ:
        raise UserError(f"SLURM_NTASKS={tasks} but this is no task of a step: start it with srun")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise UserError(f"{', '.join(missing)} not set for {tasks} tasks: slurm/common.sh sets it")
    return World(
        rank=int(environ["SLURM_PROCID"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        size=tasks,
        launcher="srun",
    )


def join_world(world: World, *, timeout_minutes: float = 10):
    """Start torch.distributed (NCCL where there is CUDA, else gloo) and choose this rank's device.

    A collective that a peer never joins fails after `timeout_minutes`.
    """
    import torch
    import torch.distributed as dist

    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if has_cuda:
        # With one GPU visible to each task the local rank counts tasks, not devices.
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(world.rank), str(world.size)
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if has_cuda else "gloo",
            rank=world.rank,
            world_size=world.size,
            store=dist.HashStore() if world.size == 1 else None,
            timeout=timedelta(minutes=timeout_minutes),
        )
    if dist.get_world_size() != world.size:
        raise UserError(f"{dist.get_world_size()} ranks joined, the launcher started {world.size}")
    _quieten_deepspeed()
    return device


def _quieten_deepspeed() -> None:
    """Hand DeepSpeed the process group as it is, and keep it from building what we do not use."""
    import logging

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # A CPU-only shared-memory all-reduce for inference that takes 32 s and a compiler to build.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def leave_world(mesh, *, together: bool) -> None:
    """Leave the process group; `together` waits for all, so that none is killed while it writes."""
    import torch.distributed as dist

    if together:
        dist.barrier(group=mesh.control_group)
    dist.destroy_process_group()
