"""Read rank and world size from the launcher's environment variables.

`deepspeed` and `torchrun` set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_*; `srun` sets SLURM_*, which
DeepSpeed does not read. It asks MPI instead, and if the N tasks find no matching PMI, each trains
alone as rank 0 of 1. So the variables are read here, and MPI discovery is off.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
TORCH_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among those that its launcher started."""

    rank: int
    local_rank: int
    local_size: int = 1  # ranks on this machine, if the launcher tells
    size: int
    launcher: str
    address: str = ""  # host:port of the store where the ranks connect
    has_store: bool = False  # the launcher (torchrun) runs that store; otherwise rank 0 does


def read_world(environ=os.environ) -> World:
    """Read the launcher's variables. Raises UserError if they contradict each other."""
    if (accelerator := environ.get("DS_ACCELERATOR", "cpu")) not in ("cpu", "cuda"):
        raise UserError(f"DS_ACCELERATOR={accelerator} in the environment: must be cpu or cuda")
    tasks = _read_size(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if "RANK" in environ:
        missing = [name for name in TORCH_NAMES if name not in environ]
        if missing:
            raise UserError(
                f"RANK is set but {', '.join(missing)} is not: use deepspeed or torchrun"
            )
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        rank, local_rank, size = (_read_number(environ, name) for name in names)
        if not rank < size:
            raise UserError(f"RANK={rank}: must be below WORLD_SIZE={size}")
        if size % tasks:  # srun may start one torchrun a node, which then starts several ranks
            raise UserError(
                f"WORLD_SIZE={size} but Slurm started {tasks} tasks; allowed: one task a rank, or "
                "one launcher a task"
            )
        has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return World(
            rank=rank,
            local_rank=local_rank,
            # torchrun's, deepspeed's
            local_size=_read_size(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
            size=size,
            launcher="torch",
            address=_read_address(environ),
            has_store=has_store,
        )
    if tasks > 1:
        if "SLURM_STEP_ID" not in environ:
            raise UserError(
                f"SLURM_NTASKS={tasks} but this process is not part of a step: start it with srun"
            )
        return World(
            rank=_read_number(environ, "SLURM_PROCID"),
            local_rank=_read_number(environ, "SLURM_LOCALID"),
            size=tasks,
            launcher="srun",
            address=_read_address(environ),
        )
    if environ.get("WORLD_SIZE", "1") != "1" or environ.get("LOCAL_RANK", "0") != "0":
        raise UserError(
            "WORLD_SIZE or LOCAL_RANK is set but RANK is not: use deepspeed or torchrun, or unset "
            "them to train in one process"
        )
    for name in MPI_SIZES:
        if environ.get(name, "1") != "1":
            raise UserError(
                f"{name}={environ[name]}: started by mpirun, where each process would train "
                "alone; use srun, deepspeed or torchrun"
            )
    return World(rank=0, local_rank=0, size=1, launcher="none")


def peek_world(environ=os.environ) -> World:
    """This rank, as far as variables tell that may contradict each other: it may tell others."""
    try:
        rank = _read_number(environ, "RANK" if "RANK" in environ else "SLURM_PROCID")
        address = _read_address(environ)
    except UserError:
        rank = 0
        address = ""
    return World(rank=rank, local_rank=0, size=rank + 1, launcher="none", address=address)


def check_memory(params: int, world: World, device_type: str, teacher: int = 0) -> None:
    """Raise UserError if this machine's memory cannot hold a model of so many parameters, and a
    teacher of so many.

    With GPUs it only warns: some machines' memory grows with use. It compares the least that any
    layout takes: every rank builds all weights in fp32, and on a CPU the ranks together also hold
    the gradient and both moments. The teacher is built when a GPU has the model's.
    """
    if device_type == "cpu":
        bytes_a_rank = params * max(4.0, 16 / world.size) + 4.0 * teacher
    else:
        bytes_a_rank = 4.0 * max(params, teacher)
    needed = bytes_a_rank * world.local_size
    free = psutil.virtual_memory().available
    if needed > free:
        and_teacher = f" and the {teacher:,} of --teacher" if teacher else ""
        cause = (
            f"the model's {params:,} parameters{and_teacher} need {needed / 1e9:,.0f} GB of this "
            f"machine's memory, {free / 1e9:,.0f} are free"
        )
        if device_type == "cuda":
            log_line(f"warning: {cause}")
            return
        raise UserError(
            f"{cause}; choose a smaller --model, --hidden-size, --num-layers or more --sharing"
        )


def name_device() -> str:
    """The name of this process's GPU, or of this machine's CPU with the number of its cores."""
    import torch

    if torch.cuda.is_available() and not wants_cpu():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor())}, {len(os.sched_getaffinity(0))} cores"


def wants_cpu(environ=os.environ) -> bool:
    """Whether the user chose to train on the CPU."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    return hidden or environ.get("DS_ACCELERATOR") == "cpu"


def find_gpu_grant(environ=os.environ) -> str | None:
    """The variable by which a launcher grants GPUs to this process, as NAME=VALUE."""
    names = ["SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"]
    if "LOCAL_SIZE" not in environ:  # the deepspeed command sets it without a GPU too
        names.insert(0, "CUDA_VISIBLE_DEVICES")
    granted = (name for name in names if environ.get(name))
    return next((f"{n}={environ[n]}" for n in granted if (n, environ[n]) != (names[-1], "0")), None)


def _read_size(environ, *names: str) -> int:
    """The first of these variables that is set; 1 if none is."""
    return next((max(_read_number(environ, name), 1) for name in names if name in environ), 1)


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
