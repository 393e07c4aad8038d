"""Values that change while training: `8@0,16@35%`, or on a straight line, `0.3..0.15@100%`.

A schedule is kept as text and read together with the number of steps of the run. Its value is a
function of the number of finished steps and of nothing else: so a stop, a resume or another layout
changes no value, and what was used up to a step is a sum of a few products.
"""

import argparse
import math
import re
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from albert_ds.base.cli import Range
from albert_ds.base.errors import UserError

SHAPES = ("linear", "cosine", "wsd")  # of the learning rate
START = re.compile(r"(\d{1,10})|(\d{1,2}(?:\.\d{1,10})?|100)%", re.ASCII)
NO_START = "must be VALUE@STEP or VALUE@SHARE%, such as 8@0 or 16@35%"
UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
EXPLANATION = """\
Schedules: VALUE@START,VALUE@START. START is a step or a share of --steps; the first is 0, also if
it is left out. A comma keeps the value until the next START; two dots join on a straight line.
  8@0,16@35%           8, and 16 from 35 % of the steps on
  0.3..0.15@100%       falls evenly from 0.3 at the first step to 0.15 at the end
  128@0,256@70%,512@9000
"""


class Varying(Range):
    """A number, or a schedule of such numbers, which stays text."""

    __slots__ = ()

    def __call__(self, text: str) -> Any:
        _, *later = re.split(r",|\.\.", text)
        for typed in later:
            if "@" not in typed:
                raise argparse.ArgumentTypeError(f"{text}: {typed!r}: {NO_START}")
        return text if later or "@" in text else Range.__call__(self, text)


class Point(NamedTuple):
    """A value from step `start` on; `is_line`: a straight line leads there from the one before."""

    value: Any
    start: int
    is_line: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """What `read_schedule` reads: points with ascending starts, the first at 0."""

    points: tuple[Point, ...]

    @property
    def starts(self) -> list[int]:
        return [point.start for point in self.points]

    @property
    def values(self) -> list[Any]:
        return [point.value for point in self.points]

    def at(self, step: int) -> Any:
        """The value that the step after `step` finished ones has."""
        number = bisect(self.starts, step)
        point = self.points[number - 1]
        after = self.points[number : number + 1]
        if not after or not after[0].is_line:
            return point.value
        share = (step - point.start) / (after[0].start - point.start)
        between = point.value + share * (after[0].value - point.value)
        return round(between) if isinstance(point.value, int) else between

    def largest(self, steps: int) -> Any:
        """The largest number that the first `steps` steps have; the first step's before it."""
        ends = {0, steps - 1, *self.starts}
        return max(self.at(step) for step in ends if 0 <= step < max(steps, 1))


def cut(schedules: Iterable[Schedule], step: int) -> list[tuple[int, int]]:
    """The first `step` steps, cut where a schedule has a point: (first step, number of steps)."""
    starts = {start for schedule in schedules for start in schedule.starts if start < step}
    return [(begin, end - begin) for begin, end in pairwise(sorted(starts | {step}))]


def read_schedule(
    name: str, text: str, num_steps: int, read: Callable[[str], Any], *, lines: bool = False
) -> Schedule:
    """The schedule that `text`, the value of the flag `name`, is in a run of `num_steps` steps.

    `read` reads a value, and raises ArgumentTypeError for a wrong one. `lines`: whether values may
    be joined by straight lines. Raises UserError for what is no schedule.
    """
    points: list[Point] = []
    for word in text.split(","):
        for number, typed in enumerate(word.split("..")):
            value, at, start = typed.partition("@")
            if not at and not points:
                start = "0"
            try:
                point = Point(read(value), _read_start(start, num_steps), number > 0)
                _check(point, points, num_steps, lines)
            except (argparse.ArgumentTypeError, ValueError) as error:
                raise UserError(f"{name} {text}: {typed!r}: {error}") from None
            points.append(point)
    return Schedule(tuple(points))


def _read_start(text: str, num_steps: int) -> int:
    match = START.fullmatch(text)
    if not match:
        raise ValueError(NO_START)
    step, share = match.groups()
    return int(step) if step else int(Fraction(share) * num_steps / 100)


def _check(point: Point, before: list[Point], num_steps: int, lines: bool) -> None:
    if point.is_line and not lines:
        raise ValueError("changes in jumps only: a comma, no `..`")
    is_late = point.start > num_steps - (not point.is_line)
    if is_late or (point.start <= before[-1].start if before else point.start > 0):
        raise ValueError(
            f"starts at step {point.start}; the first must start at 0, each other one after the "
            f"one before and below --steps {num_steps}"
        )


def plateau_end(num_steps: int, cooldown: float) -> int:
    """The finished steps after which the rate of wsd begins to fall."""
    return num_steps - max(1, round(cooldown * num_steps))


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    num_steps: int,
    shape: str = "linear",
    final: float = 0.0,
    cooldown: float = 1.0,
) -> float:
    """Rate of the update that follows `step` finished ones: a warm-up from 0, then one of SHAPES.

    linear  Falls on a straight line. As in the release (optimization.py; ALBERT paper 4.1) the line
            is counted from step 0, not from the end of the warm-up, so the rate steps down by
            `warmup_steps / num_steps` where the warm-up ends (0.001759 -> 0.001716 for 3,125 of
            125,000 steps).
    cosine  Falls on half a cosine from the end of the warm-up on.
    wsd     Stays at the peak, and falls on a straight line in the last steps: warm-up, stable,
            decay (MiniCPM). Until then the number of steps changes no rate.

    It is `final * peak` from `num_steps` on. cooldown: share of the steps in which wsd falls.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    left = max(0.0, 1 - step / num_steps)
    if shape == "wsd":
        falling = num_steps - plateau_end(num_steps, cooldown)
        left = min(1.0, max(0, num_steps - step) / falling)
    elif shape == "cosine" and left:
        left = (1 + math.cos(math.pi * (step - warmup_steps) / (num_steps - warmup_steps))) / 2
    return peak * (final + (1 - final) * left)


def read_counts(text: str) -> list[int]:
    """`500k,1M,2.5M` as numbers, ascending. Raises ArgumentTypeError."""
    matches = re.findall(r"(\d{1,15}(?:\.\d{1,9})?)([kMB]?)(?:,|$)", text, re.ASCII)
    counts = [int(Fraction(number) * UNITS[unit]) for number, unit in matches]
    is_read = ",".join(map("".join, matches)) == text
    if not (is_read and counts == sorted({*counts} - {0}) != []):
        raise argparse.ArgumentTypeError(f"{text}: must be ascending, such as 500k,1M,2.5M,1B")
    return counts
