"""Tensor parallelism: replace the block's linear layers with megatron-core's, by name.

Shoeybi et al. 2019 (Megatron-LM): Y = gelu(X A) B, with A cut by columns and B by rows, needs one
all-reduce in the forward pass and one in the backward pass; attention is cut by heads in the same
way. Every rank builds and initialises the whole model and keeps its shards, so all sizes start from
the same weights, and names in the state dict do not change. ALBERT's layers share one block, so the
encoder needs six replacements. Embedding (E = 128) and heads stay replicated.
"""

import torch
import torch.nn.functional as F
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from albert_ds.model.projections import PROJECTIONS, Projection
from albert_ds.parallel.mesh import Mesh, shard
from albert_ds.parallel.random import PerRankRandom

SHARED_INPUT = "self_attention"  # query, key and value have the same input
DROPS_SHARDED = "core"  # its dropout applies to this rank's heads only


class Column(ColumnParallelLinear):
    """Y_i = X A_i + b_i: this rank's rows of the weight, as a drop-in for `nn.Linear`."""

    cut = {"weight": 0, "bias": 0}
    get_extra_state = nn.Module.get_extra_state  # without it state dicts contain `_extra_state`

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


class ColumnPair(nn.Module):
    """A product of low rank beside a `Column`: Y_i = (X A) B_i, with A whole.

    Where Column leaves the reduction of the input's gradient to what copied the input, A's own
    gradient is summed; else that of the narrow X A is, which completes A's and the input's.
    """

    cut = {"second": 0}

    def __init__(self, *, reduces_input_grad: bool):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
        self.reduces_input_grad = reduces_input_grad

    def forward(self, x: Tensor) -> Tensor:
        if self.reduces_input_grad:
            return F.linear(_copy(F.linear(x, self.first)), self.second)
        return F.linear(F.linear(x, _copy(self.first)), self.second)


class RowPair(nn.Module):
    """A product of low rank beside a `Row`: Y = (sum_i X_i A_i) B, with B whole."""

    cut = {"first": 1}

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        narrow = reduce_from_tensor_model_parallel_region(F.linear(x, self.first))
        return F.linear(narrow, self.second)


def apply_tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Replace the layers named in `PROJECTIONS`, and what a layer adds to them, in place."""
    config = ModelParallelConfig(
        tensor_model_parallel_size=mesh.tp_size,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in PROJECTIONS:
                setattr(module, name, _shard(child, _cut(child, PROJECTIONS[name], config), mesh))
            elif name == DROPS_SHARDED:
                child.rank = mesh.tp_rank  # ty: ignore[invalid-assignment]
                setattr(module, name, PerRankRandom(child, mesh.tp_rank))
            elif name == SHARED_INPUT:
                # One all-reduce of the common input's gradient instead of three for Q, K and V.
                child.register_forward_pre_hook(_copy_input)


def _cut(
    full: nn.Module, projection: Projection, config: ModelParallelConfig
) -> Column | Row | ColumnPair | RowPair:
    """What takes the place of a projection, or of the low-rank product beside it."""
    reduces = not projection.shares_input
    if isinstance(full, nn.Linear):
        if projection.is_column:
            return Column(full, config, reduces_input_grad=reduces)
        return Row(full, config)
    return ColumnPair(reduces_input_grad=reduces) if projection.is_column else RowPair()


def _copy_input(module: nn.Module, inputs: tuple) -> tuple:
    return (_copy(inputs[0]), *inputs[1:])


def _copy(x: Tensor) -> Tensor:
    """x, whose gradient is summed over tensor-parallel peers."""
    copied = copy_to_tensor_model_parallel_region(x)
    if copied.requires_grad:
        # megatron-core silently returns a non-contiguous gradient without reducing it.
        copied.register_hook(Tensor.contiguous)
    return copied


def _shard(full: nn.Module, linear: Column | Row | ColumnPair | RowPair, mesh: Mesh) -> nn.Module:
    """Copy this rank's shard of `full` into `linear`, and mark sharded parameters."""
    for name, parameter in linear.named_parameters():
        whole = getattr(full, name).data
        dim = linear.cut.get(name)
        parameter.data = shard(whole, dim, mesh).clone()
        if dim is not None and not hasattr(parameter, "tensor_model_parallel"):
            # DeepSpeed's norm counts a shard on every rank only if this is set.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
    return linear
