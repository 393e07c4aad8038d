"""The grid of ranks, tensor parallel x data parallel, over megatron-core's `parallel_state`; and
what a rank holds of a tensor that tensor parallelism cuts.

Tensor-parallel peers have consecutive ranks (0..T-1, T..2T-1, ...), so that they share a node and
only data-parallel traffic crosses the network; parameter sharing makes that traffic small.

`Mesh` is also DeepSpeed's `mpu`. megatron-core's module cannot be: it lacks
`get_model_parallel_world_size` and `get_model_parallel_rank`, and DeepSpeed's configuration code
ignores the error and continues with a world size of 1.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def _tell(name: str):
    """A method that returns a field of `Mesh`."""
    return lambda mesh: getattr(mesh, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """This rank's place in the grid, and its groups. DeepSpeed calls the `get_*` methods."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    tp_group: ProcessGroup
    dp_rank: int
    dp_size: int
    dp_group: ProcessGroup
    control_group: ProcessGroup  # all ranks over gloo, for flags and counts on the host

    get_tensor_model_parallel_rank = get_model_parallel_rank = _tell("tp_rank")
    get_tensor_model_parallel_world_size = get_model_parallel_world_size = _tell("tp_size")
    get_tensor_model_parallel_group = get_model_parallel_group = _tell("tp_group")
    get_data_parallel_rank = _tell("dp_rank")
    get_data_parallel_world_size = _tell("dp_size")
    get_data_parallel_group = _tell("dp_group")

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.dp_group)


def build_mesh(tensor_parallel: int, *, timeout_minutes: float = 10) -> Mesh:
    """Build the grid; torch.distributed must be initialised. Collective over all ranks.

    timeout_minutes: how long a collective of its groups waits for a peer.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    timeout = timedelta(minutes=timeout_minutes)
    everyone = dist.group.WORLD
    assert everyone is not None
    if tensor_parallel == 1:
        dp_group = everyone
        # Locally: else every rank takes part in making the group of each other rank.
        tp_group = dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
    else:
        tp_group, dp_group = _cut_by_megatron(tensor_parallel, timeout_minutes)
    control_group = everyone
    if dist.get_backend() != "gloo":
        control_group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control_group, dist.ProcessGroup)
    return Mesh(
        rank=rank,
        world_size=world_size,
        tp_rank=rank % tensor_parallel,
        tp_size=tensor_parallel,
        tp_group=tp_group,
        dp_rank=rank // tensor_parallel,
        dp_size=world_size // tensor_parallel,
        dp_group=dp_group,
        control_group=control_group,
    )


def _cut_by_megatron(tensor_parallel: int, timeout_minutes: float):
    """This rank's tensor-parallel and data-parallel groups, which megatron-core's layers use."""
    from megatron.core import parallel_state  # takes 2 s

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel,
            create_gloo_process_groups=False,
            # megatron-core passes it to timedelta, which takes a fraction of a minute too.
            distributed_timeout_minutes=timeout_minutes,  # ty: ignore
        )
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )


def shard_dim(parameter: nn.Parameter) -> int | None:
    """The dimension along which tensor parallelism cuts `parameter`; None if it is whole."""
    if getattr(parameter, "tensor_model_parallel", False):
        return getattr(parameter, "partition_dim", None)
    return None


def shard(whole: Tensor, dim: int | None, mesh: Mesh) -> Tensor:
    """This rank's shard of a logical tensor, as a view; the whole tensor if `dim` is None."""
    return whole if dim is None else whole.chunk(mesh.tp_size, dim)[mesh.tp_rank]


def find_drift(model: nn.Module, mesh: Mesh) -> list[str]:
    """Names of replicated parameters that are not bit-equal on all tensor-parallel peers.

    Kernels that are not deterministic could make replicas drift apart without any error. This costs
    one all-reduce of two integer checksums per parameter. Collective over tensor-parallel peers.
    """
    if mesh.tp_size == 1:
        return []
    replicated = [(n, p) for n, p in model.named_parameters() if shard_dim(p) is None]
    # Under ZeRO-3 a rank holds a partition, and so does its peer of the same data-parallel rank.
    sums = torch.stack([_checksum(getattr(p, "ds_tensor", p).data) for _, p in replicated])
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.tp_group)
    highest, lowest = extremes.chunk(2)
    differs = (highest != -lowest).tolist()
    return [name for (name, _), differ in zip(replicated, differs, strict=True) if differ]


def _checksum(tensor: Tensor) -> Tensor:
    """Sum of the bits as integers, weighted by position so that swapped values change it."""
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).flatten()
    weights = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
    return (bits.long() * weights).sum()
