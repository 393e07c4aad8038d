"""Where DeepSpeed has put each logical tensor, and what follows from it.

ZeRO flattens a parameter group and leaves every rank one slice of the flat vector; tensor
parallelism has already left it one shard of some tensors. `read_layout` turns the wrapper's own
bookkeeping into a list of `Piece`s, the one description that everything else uses: LAMB's exact
trust ratios (`bind_lamb`) and checkpoints that no layout can be told from.

Asked of DeepSpeed since 2020 (its issues 88 and 490): a LAMB that takes the norm of a flat
partition for the norm of a tensor is off by 43 to 52 % of the update after three steps.

The attribute names are those of DeepSpeed 0.19; `tests/optim/test_zero.py` holds them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from albert_ds.optim.lamb import Lamb, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of elements of one (tensor-parallel shard of a) parameter held by this rank in fp32."""

    name: str  # logical tensor
    group: int  # parameter group of the optimizer
    flat: Tensor  # fp32 flat parameter: master weights, and the key of the optimizer's state
    start: int  # first element in `flat`
    offset: int  # first element in the flattened local shard
    numel: int


def read_layout(engine) -> list[Piece]:
    """Every piece of every parameter whose fp32 master this rank holds, for any ZeRO stage."""
    wrapper = engine.optimizer
    names = {id(p): name for name, p in engine.module.named_parameters()}
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # ZeRO-3
        return list(_zero3_pieces(wrapper, names))
    if hasattr(wrapper, "single_partition_of_fp32_groups"):  # ZeRO-1 and 2
        flats = wrapper.single_partition_of_fp32_groups
        offsets = wrapper.round_robin_bit16_offsets
        groups = wrapper.round_robin_bit16_groups
        return list(_flat_pieces(wrapper, names, groups, offsets, flats))
    if hasattr(wrapper, "fp32_groups_flat_partition"):  # ZeRO-1, bf16 with fp32 accumulation
        groups = wrapper.bf16_groups
        offsets = [_running_sum(p.numel() for p in group) for group in groups]
        return list(
            _flat_pieces(wrapper, names, groups, offsets, wrapper.fp32_groups_flat_partition)
        )
    return [  # no ZeRO: the parameters themselves
        Piece(name=names[id(p)], group=index, flat=p, start=0, offset=0, numel=p.numel())
        for index, group in enumerate(wrapper.param_groups)
        for p in group["params"]
    ]


def _running_sum(sizes: Iterable[int]) -> list[int]:
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += size
    return offsets


def _flat_pieces(wrapper, names, groups, offsets, flats):
    """ZeRO-1/2: a group is one flat vector, cut into equal partitions."""
    for index, (group, starts, flat) in enumerate(zip(groups, offsets, flats, strict=True)):
        rank = torch.distributed.get_rank(wrapper.real_dp_process_group[index])
        low, high = rank * flat.numel(), (rank + 1) * flat.numel()
        for parameter, start in zip(group, starts, strict=True):
            left, right = max(low, start), min(high, start + parameter.numel())
            if left < right:
                yield Piece(
                    name=names[id(parameter)],
                    group=index,
                    flat=flat,
                    start=left - low,
                    offset=left - start,
                    numel=right - left,
                )


def _zero3_pieces(wrapper, names):
    """ZeRO-3: every parameter is cut into equal partitions, and those are laid end to end."""
    for index, group in enumerate(wrapper.fp16_groups):
        rank = torch.distributed.get_rank(wrapper.sub_group_process_groups[index])
        start = 0
        for parameter in group:
            size = parameter.partition_numel()
            offset = rank * size
            numel = min(size, parameter.ds_numel - offset)
            if numel > 0:
                yield Piece(
                    name=names[id(parameter)],
                    group=wrapper.sub_group_to_group_id[index],
                    flat=wrapper.fp32_partitioned_groups_flat[index],
                    start=start,
                    offset=offset,
                    numel=numel,
                )
            start += size


def init_states(optimizer: torch.optim.Optimizer, pieces: list[Piece]) -> None:
    """Make every moment now, as zeros, under the names that torch's AdamW and our LAMB share.

    DeepSpeed links states to parameters after the first group's step only; states made lazily
    leave the later groups unlinked, and a checkpoint before the first step would find none.
    """
    for flat in {piece.flat for piece in pieces}:
        optimizer.state[flat] = {
            "exp_avg": torch.zeros_like(flat),
            "exp_avg_sq": torch.zeros_like(flat),
        }
        set_step_count(optimizer, flat, 0)


def set_step_count(optimizer: torch.optim.Optimizer, flat: Tensor, updates: int) -> None:
    """How many updates the moments of `flat` have seen.

    DeepSpeed's LAMB counts in a plain int, ours on the host, torch's fused AdamW on the device.
    """
    count: int | Tensor = updates
    if not hasattr(optimizer, "fused_lamb_cuda"):
        count = torch.tensor(float(updates))
        if isinstance(optimizer, torch.optim.AdamW):
            count = count.to(flat.device)
    optimizer.state[flat]["step"] = count


def bind_lamb(
    optimizer: Lamb,
    pieces: list[Piece],
    *,
    tensor_names: list[list[str]],
    is_counted: Callable[[Piece], bool],
    reduce: Callable[[Tensor], None],
) -> None:
    """Make the trust ratios those of whole logical tensors.

    Args:
        optimizer: the LAMB inside the engine.
        pieces: this rank's `read_layout`.
        tensor_names: the logical tensors of each parameter group, the same list on every rank.
        is_counted: False for a piece that another rank holds as well and counts.
        reduce: sums a float64 tensor over all ranks, in place.
    """
    segments: dict[Tensor, list[Segment]] = {piece.flat: [] for piece in pieces}
    for piece in pieces:
        segments[piece.flat].append(
            Segment(
                tensor=tensor_names[piece.group].index(piece.name),
                start=piece.start,
                numel=piece.numel,
                counted=is_counted(piece),
            )
        )
    for group, names in zip(optimizer.param_groups, tensor_names, strict=True):
        group["num_tensors"] = len(names)
        for flat in group["params"]:
            segments.setdefault(flat, [])
    optimizer.bind(segments, reduce)
