"""Where the time of the product's own step goes: forward, backward, collectives, update, data.

Nothing of the step is copied. While a run is watched, what its engine is asked for is timed from
outside (forward, backward, step), as are its batches and every collective; each moment belongs to
the innermost of these, and what lies in none of them is `other`, so the parts add up to the step.
`communication` is what the step waits for collectives; hidden ones cost it nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from albert_ds.runtime.clocks import Clock, clock_of

if TYPE_CHECKING:
    from albert_ds.runtime.traffic import Traffic
    from albert_ds.train import Run

PARTS = ("forward", "backward", "communication", "optimizer", "data_wait", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """From one moment to another, in seconds of one clock."""

    part: str
    begun: float
    ended: float


class Stopwatch:
    """Spans of the run that is being watched."""

    def __init__(self, clock: Clock, traffic: Traffic):
        self.clock, self.traffic = clock, traffic
        self._marks: list[tuple] = []

    @contextmanager
    def span(self, part: str) -> Generator[None]:
        """Time what is done inside; in a profile it bears the part's name."""
        from torch.profiler import record_function

        begun = self.clock.now()
        with record_function(part):
            yield
        self._marks.append((part, begun, self.clock.now()))

    def timed(self, part: str, function):
        @functools.wraps(function)
        def timing(*args, **kwargs):
            with self.span(part):
                return function(*args, **kwargs)

        return timing

    def timed_batches(self, batches: Iterator) -> Iterator:
        while True:
            with self.span("data_wait"):
                batch = next(batches)
            yield batch

    def spans(self) -> list[Span]:
        """All so far, those of collectives among them; the device must have been synchronised."""
        waits = [
            ("communication", begun, end)
            for event in self.traffic.events
            for begun, end in event.waits
        ]
        seconds = self.clock.seconds
        return [
            Span(part=part, begun=seconds(begun), ended=seconds(ended))
            for part, begun, ended in [*self._marks, *waits]
        ]


@contextmanager
def watch(run: Run, traffic: Traffic) -> Generator[Stopwatch]:
    """Time the parts of this run's steps, and keep its collectives one by one, meanwhile."""
    from albert_ds.runtime import engine as engines

    stopwatch = Stopwatch(clock_of(run.device), traffic)
    engine, batches, take_step = run.engine.deepspeed, run.batches, engines.take_step
    parts = {"forward": "forward", "backward": "backward", "step": "optimizer"}
    traffic.clock = stopwatch.clock
    traffic.events.clear()
    run.batches = stopwatch.timed_batches(batches)
    engines.take_step = stopwatch.timed("optimizer", take_step)
    for name, part in parts.items():
        setattr(engine, name, stopwatch.timed(part, getattr(engine, name)))
    try:
        yield stopwatch
    finally:
        for name in parts:
            delattr(engine, name)  # the class's own is found again
        engines.take_step = take_step
        run.batches = batches
        traffic.clock = None


def split(spans: list[Span]) -> dict[str, float]:
    """Seconds by part; each moment belongs to the innermost span that covers it."""
    totals = dict.fromkeys(PARTS, 0.0)
    around: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.begun, -s.ended)):
        while around and around[-1].ended <= span.begun:
            around.pop()
        seconds = span.ended - span.begun
        totals[span.part] += seconds
        if around:
            totals[around[-1].part] -= seconds
        around.append(span)
    return totals
