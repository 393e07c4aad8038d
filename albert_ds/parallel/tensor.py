"""Tensor parallelism: the shared block's linears become megatron-core's, by name.

Shoeybi et al. 2019 (Megatron-LM): Y = gelu(X A) B with A cut by columns and B by rows needs one
all-reduce forward and one backward; attention is the same with heads for columns. The model is
built and initialised whole on every rank, then each linear keeps its shard, so every tensor-
parallel size starts from bit-equal weights, and state-dict names stay those of one process. Since
layers share the block, ALBERT's whole encoder is six swaps. Embedding (E = 128) and heads stay
replicated.
"""

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from albert_ds.parallel.mesh import Mesh
from albert_ds.parallel.random import PerRankRandom

SHARED_INPUT = "self_attention"  # its query, key and value read one input
DROPS_SHARDED = "core"  # its dropout falls on this rank's heads only


class Column(ColumnParallelLinear):
    """Y_i = X A_i + b_i: this rank's rows of the weight, as a drop-in for `nn.Linear`."""

    cut = {"weight": 0, "bias": 0}
    get_extra_state = nn.Module.get_extra_state  # else state dicts would grow an `_extra_state`

    def __init__(self, full: nn.Linear, config: ModelParallelConfig, *, reduces_input_grad: bool):
        super().__init__(
            full.in_features,
            full.out_features,
            config=config,
            init_method=nn.init.zeros_,
            disable_grad_reduce=not reduces_input_grad,
        )

    def forward(self, input_: Tensor) -> Tensor:  # ty: ignore[incompatible-method-override]
        return super().forward(input_)[0]


class Row(RowParallelLinear):
    """Y = sum_i X_i A_i + b: this rank's columns of the weight; the bias is whole everywhere."""

    cut = {"weight": 1}
    get_extra_state = nn.Module.get_extra_state

    def __init__(self, full: nn.Linear, config: ModelParallelConfig):
        super().__init__(
            full.in_features,
            full.out_features,
            config=config,
            init_method=nn.init.zeros_,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, input_: Tensor) -> Tensor:
        return super().forward(input_)[0]


PLAN = {
    "query": lambda full, config: Column(full, config, reduces_input_grad=False),
    "key": lambda full, config: Column(full, config, reduces_input_grad=False),
    "value": lambda full, config: Column(full, config, reduces_input_grad=False),
    "output": Row,
    "up": lambda full, config: Column(full, config, reduces_input_grad=True),
    "down": Row,
}


def apply_tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Swap the linears named in `PLAN`, in place; nothing at tensor-parallel size 1."""
    if mesh.tp_size == 1:
        return
    config = ModelParallelConfig(
        tensor_model_parallel_size=mesh.tp_size,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in PLAN:
                assert isinstance(child, nn.Linear), name
                setattr(module, name, _shard(child, PLAN[name](child, config), mesh))
            elif name == DROPS_SHARDED:
                setattr(module, name, PerRankRandom(child, mesh.tp_rank))
            elif name == SHARED_INPUT:
                # One all-reduce of the common input's gradient instead of one each for Q, K and V.
                child.register_forward_pre_hook(_copy_input)


def _copy_input(module: nn.Module, inputs: tuple) -> tuple:
    copied = copy_to_tensor_model_parallel_region(inputs[0])
    if copied.requires_grad:
        # megatron-core gives a gradient that is not contiguous back unreduced, without a word.
        copied.register_hook(Tensor.contiguous)
    return (copied, *inputs[1:])


def _shard(full: nn.Linear, linear: Column | Row, mesh: Mesh) -> nn.Module:
    """Give `linear` this rank's shard of `full`, and mark what is a shard."""
    for name, parameter in linear.named_parameters():
        whole, dim = getattr(full, name).data, linear.cut.get(name)
        parameter.data = shard(whole, dim, mesh).clone()
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            # DeepSpeed's norm and clipping count a shard on every rank only where this is set.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
    return linear


def shard_dim(parameter: nn.Parameter) -> int | None:
    """The dimension along which `parameter` is cut over tensor-parallel ranks, None if whole."""
    if getattr(parameter, "tensor_model_parallel", False):
        return getattr(parameter, "partition_dim", None)
    return None


def shard(whole: Tensor, dim: int | None, mesh: Mesh) -> Tensor:
    """This rank's shard of a logical tensor (a view); all of it where `dim` is None."""
    return whole if dim is None else whole.chunk(mesh.tp_size, dim)[mesh.tp_rank]


def find_drift(model: nn.Module, mesh: Mesh) -> list[str]:
    """Names of replicated parameters that are not bit-equal on all tensor-parallel peers.

    One all-reduce of a vector with two exact integer checksums a parameter. Kernels that are not
    deterministic could let replicas drift apart; nothing else would ever tell.
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
    """Sum of the bits as integers, weighted by position so that a swap shows too."""
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).flatten()
    weights = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
    return (bits.long() * weights).sum()
