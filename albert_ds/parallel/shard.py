"""What a rank holds of a tensor that tensor parallelism cuts, and whether peers hold the same."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from albert_ds.parallel.mesh import Mesh


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
