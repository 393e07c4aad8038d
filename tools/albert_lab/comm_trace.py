"""Collectives one by one: when each began and was done, who waited, and their sums by kind.

A GPU is given work ahead of time, so the host's clock says when work was issued, not when it ran.
On a GPU a mark is a CUDA event in the stream; a stream that waits for a collective reaches the next
mark later. `seconds` may be asked once the device has been synchronised.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from albert_ds.parallel.mesh import Mesh
from albert_lab.scaling.collectives import (
    ACTIVATIONS,
    GRADIENTS,
    MATRICES,
    SMALL,
    WEIGHTS,
    ring_bytes,
)

SMALL_BYTES = 1 << 13  # LAMB's two sums for each of a 24-layer BERT's matrices are 5 kB
SCALAR_BYTES = 64  # a norm or a flag over tensor-parallel peers


class HostClock:
    """With gloo and a CPU the host does everything, so its own clock is right."""

    def now(self) -> Any:
        """A mark."""
        return time.perf_counter()

    def seconds(self, mark) -> float:
        """Seconds from a moment that all marks share to `mark`."""
        return mark

    def when_done(self, work, note: Callable[[Any], None]) -> None:
        """Call `note` with the mark at which the asynchronous collective `work` is done."""
        work.get_future().add_done_callback(lambda _: note(time.perf_counter()))

    def holds_up_the_step(self) -> bool:
        """Whether a wait here and now delays the computation of the step."""
        return True


class StreamClock(HostClock):
    """Marks in the CUDA stream that is current here. Waits in other streams are hidden."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._beside = torch.cuda.Stream()
        self._origin = self.now()

    def now(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def seconds(self, mark: torch.cuda.Event) -> float:
        return self._origin.elapsed_time(mark) / 1e3

    def when_done(self, work, note: Callable[[torch.cuda.Event], None]) -> None:
        with torch.cuda.stream(self._beside):
            work.wait()
            note(self.now())

    def holds_up_the_step(self) -> bool:
        return torch.cuda.current_stream() == self._stream


def clock_of(device: torch.device) -> HostClock:
    return StreamClock() if device.type == "cuda" else HostClock()


@dataclass(kw_only=True, slots=True)
class Event:
    """One collective. Times are marks of the clock that recorded it."""

    collective: str
    group: Any  # None: all ranks
    bytes: int
    begun: Any
    done: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # from, to


class EventRecorder:
    """An observer of `Traffic` that keeps each collective with its times."""

    def __init__(self, clock: HostClock):
        self.clock = clock
        self.events: list[Event] = []

    def __call__(self, collective: str, group, num_bytes: int, call: Callable[[], Any]):
        begun = self.clock.now()
        event = Event(collective=collective, group=group, bytes=num_bytes, begun=begun)
        self.events.append(event)
        work = call()
        self.note_wait(event, begun)
        if work is None:
            event.done = self.clock.now()
            return None

        def note_end(mark) -> None:
            event.done = mark

        self.clock.when_done(work, note_end)
        return _TimedWork(work, event, self)

    def note_wait(self, event: Event, begun) -> None:
        """Charge the time from `begun` until now to `event`, where it delays the step."""
        if self.clock.holds_up_the_step():
            event.waits.append((begun, self.clock.now()))


class _TimedWork:
    """The handle of an asynchronous collective; its `wait` is recorded."""

    def __init__(self, work, event: Event, recorder: EventRecorder):
        self._work, self._event, self._recorder = work, event, recorder

    def wait(self, *args, **kwargs):
        begun = self._recorder.clock.now()
        result = self._work.wait(*args, **kwargs)
        self._recorder.note_wait(self._event, begun)
        return result

    def __getattr__(self, name: str):
        return getattr(self._work, name)


@dataclass(kw_only=True, slots=True)
class Volume:
    """Sums over one kind of collective."""

    calls: int = 0
    bytes: int = 0  # of the full tensors
    wire: float = 0.0  # bytes that a rank sends
    seconds: float = 0.0  # from the call until it was done
    exposed_seconds: float = 0.0  # ... of which the step waited; the rest was hidden
    by: Counter[str] = field(default_factory=Counter)  # calls by collective

    def report(self, steps: int) -> dict:
        """Means per step, as the reports have them."""
        return {
            "collectives": {name: count / steps for name, count in self.by.items()},
            "calls": self.calls / steps,
            "bytes": self.bytes / steps,
            "wire_bytes": self.wire / steps,
            "seconds": self.seconds / steps,
            "exposed_seconds": self.exposed_seconds / steps,
            "hidden_seconds": max(0.0, self.seconds - self.exposed_seconds) / steps,
        }


def sum_up(events: Iterable[Event], mesh: Mesh, clock: HostClock) -> dict[str, Volume]:
    """Volumes by kind. Collectives within one rank move nothing and are left out."""
    volumes: dict[str, Volume] = {}
    for event in events:
        size = group_size(event, mesh)
        if size == 1:
            continue
        volume = volumes.setdefault(kind_of(event, mesh), Volume())
        volume.calls += 1
        volume.bytes += event.bytes
        volume.wire += ring_bytes(event.bytes, size, is_all_reduce=event.collective == "all_reduce")
        # A future may tell of its end a moment after `wait` has returned.
        done = event.waits[-1][1] if event.done is None else event.done
        volume.seconds += clock.seconds(done) - clock.seconds(event.begun)
        volume.exposed_seconds += sum(
            clock.seconds(end) - clock.seconds(begun) for begun, end in event.waits
        )
        volume.by[event.collective] += 1
    return dict(sorted(volumes.items()))


def kind_of(event: Event, mesh: Mesh) -> str:
    if mesh.tp_size > 1 and event.group is mesh.tp_group and event.bytes > SCALAR_BYTES:
        return ACTIVATIONS
    if event.bytes <= SMALL_BYTES:
        return SMALL
    if event.group is None and event.collective in ("reduce", "broadcast"):
        return MATRICES
    return WEIGHTS if event.collective.startswith("all_gather") else GRADIENTS


def group_size(event: Event, mesh: Mesh) -> int:
    return mesh.world_size if event.group is None else dist.get_world_size(event.group)
