"""Every byte that a collective moves, counted where all of them pass: `torch.distributed`.

DeepSpeed's own logger sees only `deepspeed.comm`; megatron-core and this trainer call
torch.distributed directly. `record_traffic` must run before either is imported, since both keep
references to the functions they find. Bytes are those of the full tensor: of an all-reduce its
input, of a gather its output, of a reduce-scatter its input.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Calls and bytes by collective."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    @property
    def total_bytes(self) -> int:
        return self.bytes.total()

    def copy(self) -> Traffic:
        return Traffic(calls=self.calls.copy(), bytes=self.bytes.copy())

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(calls=self.calls + other.calls, bytes=self.bytes + other.bytes)

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(calls=self.calls - earlier.calls, bytes=self.bytes - earlier.bytes)


def record_traffic() -> Traffic:
    """Count every collective of this process from now on."""
    import torch.distributed as dist

    traffic = Traffic()
    for name, position in COLLECTIVES.items():
        setattr(dist, name, _counting(getattr(dist, name), name, position, traffic))
    return traffic


def _counting(function, name: str, position: int, traffic: Traffic):
    @functools.wraps(function)
    def counted(*args, **kwargs):
        full = args[position] if len(args) > position else next(iter(kwargs.values()))
        traffic.calls[name] += 1
        traffic.bytes[name] += _num_bytes(full)
        return function(*args, **kwargs)

    return counted


def _num_bytes(full) -> int:
    if isinstance(full, list | tuple):
        return sum(map(_num_bytes, full))
    return full.numel() * full.element_size()
