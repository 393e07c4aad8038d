"""The grid of ranks, tensor parallel x data parallel, over megatron-core's `parallel_state`.

Tensor-parallel peers have consecutive ranks (0..T-1, T..2T-1, ...), so that they share a node and
only data-parallel traffic crosses the network; parameter sharing makes that traffic small.

`Mesh` is also DeepSpeed's `mpu`. megatron-core's module cannot be: it lacks
`get_model_parallel_world_size` and `get_model_parallel_rank`, and DeepSpeed's configuration code
ignores the error and continues with a world size of 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from albert_ds.errors import UserError

if TYPE_CHECKING:  # checking a command line must not import torch
    from torch.distributed import ProcessGroup


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

    def get_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self.tp_size

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.tp_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tp_size

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        return self.tp_group

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        import torch.distributed as dist

        return dist.get_process_group_ranks(self.dp_group)


def check_tensor_parallel(
    tensor_parallel: int, *, world_size: int, num_heads: int, ffn_size: int
) -> None:
    """Raise UserError where `tensor_parallel` does not divide the ranks, heads or FFN size."""
    for what, size in (
        ("the number of ranks", world_size),
        ("--num-heads", num_heads),
        ("--ffn-size", ffn_size),
    ):
        if size % tensor_parallel:
            allowed = [t for t in range(1, size + 1) if size % t == 0]
            raise UserError(
                f"--tensor-parallel {tensor_parallel} does not divide {what} {size}; "
                f"allowed: {', '.join(map(str, allowed[:8]))}"
            )


def build_mesh(tensor_parallel: int, *, timeout_minutes: float = 10) -> Mesh:
    """Build the grid; torch.distributed must be initialised. Collective over all ranks.

    timeout_minutes: how long a collective of its groups waits for a peer.
    """
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
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
