"""Split the time of the trainer's own step: forward, backward, collectives, update, data.

The step names its parts (`Run.span`); while a run is watched, each part and each collective is
timed. Every moment belongs to the innermost part around it, and to `other` where there is none, so
the parts add up to the step. `communication` is the time that the step waits for collectives; a
hidden collective costs it nothing.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import record_function

from albert_ds.training.pretrain import Run
from albert_lab.comm_trace import Event, EventRecorder, clock_of
from albert_lab.tables import PARTS
from albert_lab.traffic import Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """From one moment to another, in seconds of one clock."""

    part: str
    begun: float
    ended: float


class Stopwatch:
    """Spans of the run that is being watched."""

    def __init__(self, recorder: EventRecorder):
        self._recorder = recorder
        self.clock = recorder.clock
        self._marks: list[tuple] = []

    @property
    def events(self) -> list[Event]:
        """The collectives so far."""
        return self._recorder.events

    @contextmanager
    def span(self, part: str) -> Generator[None]:
        """Time the block inside; a profile shows it under the part's name."""
        begun = self.clock.now()
        with record_function(part):
            yield
        self._marks.append((part, begun, self.clock.now()))

    def spans(self) -> list[Span]:
        """All so far, those of collectives among them; the device must have been synchronised."""
        waits = [
            ("communication", begun, end) for event in self.events for begun, end in event.waits
        ]
        seconds = self.clock.seconds
        return [
            Span(part=part, begun=seconds(begun), ended=seconds(ended))
            for part, begun, ended in [*self._marks, *waits]
        ]


@contextmanager
def watch(run: Run, traffic: Traffic) -> Generator[Stopwatch]:
    """Time the parts of this run's steps and keep its collectives one by one, meanwhile."""
    recorder = EventRecorder(clock_of(run.device))
    stopwatch = Stopwatch(recorder)
    untimed = run.span
    run.span = stopwatch.span
    traffic.observer = recorder
    try:
        yield stopwatch
    finally:
        run.span = untimed
        traffic.observer = None


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
