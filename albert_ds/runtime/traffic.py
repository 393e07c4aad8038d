"""Every byte that a collective moves, counted where all of them pass: `torch.distributed`.

DeepSpeed's own logger sees only `deepspeed.comm`; megatron-core and this trainer call
torch.distributed directly. `record_traffic` must run before either is imported, since both keep
references to the functions they find. Bytes are those of the full tensor: of an all-reduce its
input, of a gather its output, of a reduce-scatter its input.

While something is measured, each collective is kept as an `Event` as well: when it began and was
done, and when anything waited for it. What it took and nobody waited for was hidden behind
computation.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from albert_ds.runtime.clocks import Clock

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


@dataclass(kw_only=True, slots=True)
class Event:
    """One collective. Times are marks of the clock that it was recorded by."""

    collective: str
    group: Any  # None: all ranks
    bytes: int
    begun: Any
    done: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # from, to


@dataclass(kw_only=True, slots=True)
class Traffic:
    """Calls and bytes by collective; one by one as well, while there is a clock."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    clock: Clock | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return self.bytes.total()

    def copy(self) -> Traffic:
        return Traffic(calls=self.calls.copy(), bytes=self.bytes.copy())

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(calls=self.calls + other.calls, bytes=self.bytes + other.bytes)

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(calls=self.calls - earlier.calls, bytes=self.bytes - earlier.bytes)


class _TimedWork:
    """What an asynchronous collective returned; its `wait` is noted."""

    def __init__(self, work, event: Event, clock: Clock):
        self._work, self._event, self._clock = work, event, clock

    def wait(self, *args, **kwargs):
        begun = self._clock.now()
        result = self._work.wait(*args, **kwargs)
        _note_wait(self._event, self._clock, begun)
        return result

    def __getattr__(self, name: str):
        return getattr(self._work, name)


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
        clock = traffic.clock
        if clock is None:
            return function(*args, **kwargs)
        group = args[GROUPS[name]] if len(args) > GROUPS[name] else kwargs.get("group")
        event = Event(collective=name, group=group, bytes=size, begun=clock.now())
        traffic.events.append(event)
        work = function(*args, **kwargs)
        _note_wait(event, clock, event.begun)
        if work is None:
            event.done = clock.now()
            return None
        clock.note_end(work, event)
        return _TimedWork(work, event, clock)

    return counted


def _note_wait(event: Event, clock: Clock, begun) -> None:
    """From `begun` until now was spent in the call or its `wait`, by what computes the step."""
    if clock.holds_up_the_step():
        event.waits.append((begun, clock.now()))


def _num_bytes(full) -> int:
    if isinstance(full, list | tuple):
        return sum(map(_num_bytes, full))
    return full.numel() * full.element_size()
