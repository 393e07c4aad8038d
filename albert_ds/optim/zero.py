"""Find each logical tensor inside DeepSpeed's ZeRO wrappers.

ZeRO flattens a parameter group and gives every rank one slice of the flat vector; tensor
parallelism cuts some tensors before that. `read_layout` turns the wrapper's bookkeeping into a list
of `ParamFragment`s. Norms and matrices of the optimizers, the fp32 master weights
(`fill_masters`) and the layout-independent checkpoints use that list.

DeepSpeed's issues 88 and 490 ask for LAMB under ZeRO since 2020. A LAMB that uses the norm of a
flat partition as the norm of a tensor is off by 43 to 52 % of the update after three steps.

The attribute names are those of DeepSpeed 0.19; `tests/optim/test_zero.py` checks them.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from albert_ds.optim.fragments import ParamFragment
from albert_ds.optim.norms import compute_norms


def read_layout(engine) -> list[ParamFragment]:
    """All fragments whose fp32 master weights this rank holds, for any ZeRO stage."""
    wrapper = engine.optimizer
    names = {id(p): name for name, p in engine.module.named_parameters()}
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # ZeRO-3
        return list(_zero3_fragments(wrapper, names))
    if hasattr(wrapper, "single_partition_of_fp32_groups"):  # ZeRO-1 and 2
        flats = wrapper.single_partition_of_fp32_groups
        offsets = wrapper.round_robin_bit16_offsets
        groups = wrapper.round_robin_bit16_groups
        return list(_flat_fragments(wrapper, names, groups, offsets, flats))
    if hasattr(wrapper, "fp32_groups_flat_partition"):  # ZeRO-1, bf16 with fp32 accumulation
        flats = wrapper.fp32_groups_flat_partition
        groups = wrapper.bf16_groups
        offsets = [[0, *accumulate(p.numel() for p in group[:-1])] for group in groups]
        return list(_flat_fragments(wrapper, names, groups, offsets, flats))
    return [  # no ZeRO: the parameters themselves
        ParamFragment(name=names[id(p)], group=index, flat=p, start=0, offset=0, numel=p.numel())
        for index, group in enumerate(wrapper.param_groups)
        for p in group["params"]
    ]


def _flat_fragments(wrapper, names, groups, offsets, flats):
    """ZeRO-1/2: a group is one flat vector, cut into equal partitions."""
    for index, (group, starts, flat) in enumerate(zip(groups, offsets, flats, strict=True)):
        rank = torch.distributed.get_rank(wrapper.real_dp_process_group[index])
        low = rank * flat.numel()
        high = (rank + 1) * flat.numel()
        for parameter, start in zip(group, starts, strict=True):
            left = max(low, start)
            right = min(high, start + parameter.numel())
            yield ParamFragment(
                name=names[id(parameter)],
                group=index,
                flat=flat,
                start=left - low,
                offset=left - start,
                numel=max(0, right - left),
            )


def _zero3_fragments(wrapper, names):
    """ZeRO-3: every parameter is cut into equal partitions, which are concatenated."""
    for index, group in enumerate(wrapper.fp16_groups):
        rank = torch.distributed.get_rank(wrapper.sub_group_process_groups[index])
        start = 0
        for parameter in group:
            size = parameter.partition_numel()
            offset = rank * size
            yield ParamFragment(
                name=names[id(parameter)],
                group=wrapper.sub_group_to_group_id[index],
                flat=wrapper.fp32_partitioned_groups_flat[index],
                start=start,
                offset=offset,
                numel=max(0, min(size, parameter.ds_numel - offset)),
            )
            start += size


def init_states(
    optimizer: torch.optim.Optimizer,
    fragments: list[ParamFragment],
    moments: Callable[[dict], tuple[str, ...]],
    *,
    has_average: bool = False,
) -> None:
    """Allocate the states of each group, by the names that `moments` gives it, as zeros.

    An average of the weights is a state too; it starts as the weights.

    DeepSpeed links states to parameters once, after the step of the first group: states that are
    allocated later stay unlinked, and a checkpoint before the first step would find none.
    """
    for flat, group in {fragment.flat: fragment.group for fragment in fragments}.items():
        names = moments(optimizer.param_groups[group])
        optimizer.state[flat] = {moment: torch.zeros_like(flat) for moment in names}
        if has_average:
            optimizer.state[flat]["average"] = flat.detach().clone()


def fill_masters(fragments: list[ParamFragment], weights: dict[str, Tensor]) -> None:
    """Copy `weights` (this rank's fp32 shards by name) into the master weights.

    DeepSpeed makes the masters of a 16-bit run from the weights after it has rounded them.
    """
    for fragment in fragments:
        source = weights[fragment.name].reshape(-1)[fragment.in_shard]
        fragment.flat.data.view(-1)[fragment.in_flat] = source


@contextmanager
def freeze_fragments(
    optimizer: torch.optim.Optimizer, fragments: list[ParamFragment]
) -> Generator[None]:
    """Within the block, the optimizer's steps leave these fragments and their moments as they are.

    A zero gradient alone would not: moments fade, and weights decay.
    """
    kept: list[Tensor] = []

    def views() -> Iterator[Tensor]:
        for fragment in fragments:
            flat = fragment.flat
            for held in (flat.data, *optimizer.state[flat].values()):
                if isinstance(held, Tensor) and held.shape == flat.shape:
                    yield held.view(-1)[fragment.in_flat]

    def restore(*_) -> None:
        for view, old in zip(views(), kept, strict=True):
            view.copy_(old)
        kept.clear()

    hooks = []
    if fragments:
        before = optimizer.register_step_pre_hook(
            lambda *_: kept.extend(x.clone() for x in views())
        )
        hooks = [before, optimizer.register_step_post_hook(restore)]
    yield
    for hook in hooks:
        hook.remove()


def use_exact_norms(wrapper) -> None:
    """Let DeepSpeed's bf16 wrapper compute the clipping norm from exact norms of the tensors.

    It adds squares in fp32 (the other ZeRO wrappers use float64). It is given one number for each
    gradient, the gradient's norm, because the norm of a single number is that number.
    """
    if not hasattr(wrapper, "get_grads_for_norm"):
        return
    find_gradients = wrapper.get_grads_for_norm

    def find_norms(for_clipping: bool = False):
        if for_clipping:  # these gradients are scaled in place
            return find_gradients(for_clipping=True)
        gradients, experts = find_gradients()
        norms = compute_norms(gradients).float() if gradients else torch.zeros(0)
        return list(norms), experts

    wrapper.get_grads_for_norm = find_norms
