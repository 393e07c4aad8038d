"""What time it is where a step is computed: on the host, or in the CUDA stream.

A GPU is given work ahead of time, so the host's clock says when work was issued, not when it ran.
There a mark is a CUDA event, which the stream passes in its turn; a stream that waits for a
collective passes the next one later. `seconds` may be asked once the device has been synchronised.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from albert_ds.runtime.traffic import Event


class Clock(Protocol):
    def now(self) -> Any:
        """A mark."""

    def seconds(self, mark) -> float:
        """Of a mark, since some moment that all marks share."""

    def note_end(self, work, event: Event) -> None:
        """Have `event.done` set when the asynchronous collective `work` is done."""

    def holds_up_the_step(self) -> bool:
        """Whether a wait here and now delays the computation of the step."""


class HostClock:
    """With gloo and a CPU the host does everything, so its own clock is right."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark

    def note_end(self, work, event: Event) -> None:
        def note(_) -> None:
            event.done = time.perf_counter()

        work.get_future().add_done_callback(note)

    def holds_up_the_step(self) -> bool:
        return True


class StreamClock:
    """Marks in the CUDA stream that is current here. Streams beside it hide what they wait for."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._stream = torch.cuda.current_stream()
        self._beside = torch.cuda.Stream()
        self._origin = self.now()

    def now(self) -> torch.cuda.Event:
        mark = self._cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def seconds(self, mark: torch.cuda.Event) -> float:
        return self._origin.elapsed_time(mark) / 1e3

    def note_end(self, work, event: Event) -> None:
        with self._cuda.stream(self._beside):
            work.wait()
            event.done = self.now()

    def holds_up_the_step(self) -> bool:
        return self._cuda.current_stream() == self._stream


def clock_of(device: torch.device) -> Clock:
    return StreamClock() if device.type == "cuda" else HostClock()
