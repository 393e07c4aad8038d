"""Observe every collective of this process and its bytes, in `torch.distributed` itself.

DeepSpeed's own logger sees only the calls made through `deepspeed.comm`; megatron-core and this
trainer call torch.distributed directly. The bytes are those of the full tensor: the input of an
all-reduce, the output of a gather, the input of a reduce-scatter.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Function -> position of the argument that is the full tensor (or list of tensors).
COLLECTIVES = {
    "all_reduce": 0,
    "broadcast": 0,
    "reduce": 0,
    "all_gather": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
}
# Function -> position of its process group.
GROUPS = dict.fromkeys(COLLECTIVES, 2) | dict.fromkeys(
    ("reduce", "reduce_scatter", "reduce_scatter_tensor"), 3
)
# Makes the call in our place: observer(name, group, bytes, call) returns what `call()` returns.
# `group` is None for all ranks.
Observer = Callable[[str, Any, int, Callable[[], Any]], Any]


@dataclass(kw_only=True, slots=True)
class Traffic:
    """The collectives of a process; the `observer`, while there is one, makes each call itself."""

    observer: Observer | None = None


def record_traffic() -> Traffic:
    """Hand every collective of this process to an observer from now on.

    Call it before DeepSpeed's process group is opened (`join_world`) and before megatron-core is
    imported: both keep references to the gather and scatter functions that they find, and calls
    through such a reference would not be seen.
    """
    import torch.distributed as dist

    traffic = Traffic()
    for name, position in COLLECTIVES.items():
        setattr(dist, name, _observing(getattr(dist, name), name, position, traffic))
    return traffic


def _observing(function, name: str, position: int, traffic: Traffic):
    @functools.wraps(function)
    def observed(*args, **kwargs):
        if traffic.observer is None:
            return function(*args, **kwargs)
        size = _num_bytes([*args, *kwargs.values()][position])
        group = args[GROUPS[name]] if len(args) > GROUPS[name] else kwargs.get("group")
        return traffic.observer(name, group, size, lambda: function(*args, **kwargs))

    return observed


def _num_bytes(full) -> int:
    if isinstance(full, list | tuple):
        return sum(map(_num_bytes, full))
    return full.numel() * full.element_size()
