"""From a launcher's environment to a process group: the one place that reads `os.environ`.

`deepspeed` and `torchrun` set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_*; `srun` sets SLURM_*, which
DeepSpeed never reads: left to itself it asks MPI, and N tasks that find no matching PMI each train
alone as rank 0 of a world of one. So the world is read here and MPI discovery stays off.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

from albert_ds.errors import UserError

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
TORCH_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Who this process is among those its launcher started."""

    rank: int
    local_rank: int
    local_size: int = 1  # ranks that share this machine's cores, where the launcher says so
    size: int
    launcher: str
    address: str = ""  # host:port where the ranks meet
    has_store: bool = False  # the launcher keeps a store there (torchrun); else rank 0 does


def read_world(environ=os.environ) -> World:
    """Read the world from the launcher's variables; raise UserError where they contradict."""
    tasks = _read_tasks(environ)
    if "RANK" in environ:
        missing = [name for name in TORCH_NAMES if name not in environ]
        if missing:
            raise UserError(
                f"RANK is set but {', '.join(missing)} is not: use deepspeed or torchrun"
            )
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        rank, local_rank, size = (_read_number(environ, name) for name in names)
        if not rank < size:
            raise UserError(f"RANK={rank} with WORLD_SIZE={size}: must be below it")
        if size % tasks:  # srun may start one torchrun a node, which then starts several ranks
            raise UserError(
                f"WORLD_SIZE={size} but Slurm started {tasks} tasks; allowed: one task a rank, or "
                "one launcher a task"
            )
        has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return World(
            rank=rank,
            local_rank=local_rank,
            local_size=_read_local_size(environ),
            size=size,
            launcher="torch",
            address=_read_address(environ),
            has_store=has_store,
        )
    if tasks > 1:
        if "SLURM_STEP_ID" not in environ:
            raise UserError(
                f"SLURM_NTASKS={tasks} but this is no task of a step: start it with srun"
            )
        return World(
            rank=_read_number(environ, "SLURM_PROCID"),
            local_rank=_read_number(environ, "SLURM_LOCALID"),
            size=tasks,
            launcher="srun",
            address=_read_address(environ),
        )
    for name in MPI_SIZES:
        if environ.get(name, "1") != "1":
            raise UserError(
                f"{name}={environ[name]}: started by mpirun, where each process would train "
                "alone; use srun, deepspeed or torchrun"
            )
    return World(rank=0, local_rank=0, size=1, launcher="none")


def _read_tasks(environ) -> int:
    """How many tasks Slurm started, 1 outside Slurm."""
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if name in environ:
            return max(_read_number(environ, name), 1)
    return 1


def _read_local_size(environ) -> int:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # torchrun's, deepspeed's
        if name in environ:
            return max(_read_number(environ, name), 1)
    return 1


def _read_number(environ, name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise UserError(f"{name}={text!r} in the environment: must be a whole number")
    return int(text)


def _read_address(environ) -> str:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise UserError(f"{', '.join(missing)} not set: slurm/common.sh sets it")
    port = _read_number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={port} in the environment: must be 1 to 65535")
    return f"{environ['MASTER_ADDR']}:{port}"


def open_store(world: World, patience: timedelta, *, is_host: bool = False):
    """A connection to the store where the ranks meet. `patience` bounds every answer."""
    import torch.distributed as dist

    host, _, port = world.address.rpartition(":")
    store = dist.TCPStore(
        host,
        int(port),
        is_master=is_host and not world.has_store,
        timeout=patience,
        wait_for_workers=False,
    )
    # A launcher's store outlives its ranks: what those of an earlier try wrote does not count.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"albert-ds/{attempt}", store)


def join_world(world: World, *, timeout_minutes: float = 10):
    """Start torch.distributed (NCCL where there is CUDA, else gloo) and choose this rank's device.

    Raises MachineFailed naming the ranks that have not come after `timeout_minutes`. A collective
    that a peer never joins fails a minute later than that: the roll call, which can say who it
    is, comes first.
    """
    import torch
    import torch.distributed as dist

    from albert_ds.runtime.roll_call import gather_world

    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if has_cuda:
        # With one GPU visible to each task the local rank counts tasks, not devices.
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        if world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            # torch would give every rank all cores.
            torch.set_num_threads(max(1, torch.get_num_threads() // world.local_size))
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(world.rank), str(world.size)
    os.environ["LOCAL_RANK"] = str(world.local_rank)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if has_cuda else "gloo",
            rank=world.rank,
            world_size=world.size,
            store=gather_world(world, minutes=timeout_minutes) or dist.HashStore(),
            timeout=timedelta(minutes=timeout_minutes + 1),
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
