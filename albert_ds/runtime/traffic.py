"""Every byte that a collective moves, counted where all of them pass: `torch.distributed`.

DeepSpeed's own logger sees only `deepspeed.comm`; megatron-core and this trainer call
torch.distributed directly. `record_traffic` must run before either is imported, since both keep
references to the functions they find. Bytes are those of the full tensor: of an all-reduce its
input, of a gather its output, of a reduce-scatter its input.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
# ... -> position of its group.
GROUPS = dict.fromkeys(COLLECTIVES, 2) | dict.fromkeys(
    ("reduce", "reduce_scatter", "reduce_scatter_tensor"), 3
)


class Event(NamedTuple):
    """One collective."""

    collective: str
    group: Any  # None: all ranks
    bytes: int
    # That the host was in the call: with gloo, all it took; with NCCL, only to issue it.
    seconds: float


@dataclass(kw_only=True, slots=True)
class Traffic:
    """Calls and bytes by collective."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    events: list[Event] | None = None  # one by one, where a list is given

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
        full = [*args, *kwargs.values()][position]
        size = _num_bytes(full)
        traffic.calls[name] += 1
        traffic.bytes[name] += size
        if traffic.events is None:
            return function(*args, **kwargs)
        group = args[GROUPS[name]] if len(args) > GROUPS[name] else kwargs.get("group")
        begun = time.perf_counter()
        result = function(*args, **kwargs)
        traffic.events.append(Event(name, group, size, time.perf_counter() - begun))
        return result

    return counted


def _num_bytes(full) -> int:
    if isinstance(full, list | tuple):
        return sum(map(_num_bytes, full))
    return full.numel() * full.element_size()
