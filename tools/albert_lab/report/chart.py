"""One chart as the numbers of an inline SVG: paths, ticks and places of labels.

A chart is 360 units wide and is shown about that wide, on a phone as in a column of a wide page;
so its text is as large in both. charts.svg holds the elements, charts.css the colours for light and
dark; page.html is the page of a report, curves.svg the picture of `albert-ds plots curves`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 340, 14, 198  # edges of the plot
SPACING = 12  # least distance of two labels
LARGE_RATIO = 50  # of the largest value to the smallest: from here on an axis is logarithmic
MOST_MARKERS, MOST_WHISKERS = 16, 40  # of a line
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MARKERS = (
    "m-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",  # circle
    "m-3.5,-3.5h7v7h-7z",  # square
    "m0,-4.5l4.5,8h-9z",  # triangle
    "m0,-5l5,5l-5,5l-5,-5z",  # diamond
    "m0,4.5l4.5,-8h-9z",  # triangle, point down
    "m-4,-4l8,8m0,-8l-8,8",  # cross
)


DASHES = ("", "6 3", "2 3", "8 3 2 3", "10 4", "4 2 1 2 1 2")


class Point(NamedTuple):
    """A value, and the interval or the range around it."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Values of one run. A point whose y is NaN is a gap."""

    run: int  # number of the run, which decides the style
    name: str  # what it shows, such as "held out"
    points: Sequence[Point]
    is_main: bool = True  # thick, with markers; else thin, behind the others
    is_area: bool = False  # filled down to the axis


class Level(NamedTuple):
    """A horizontal line to compare with."""

    y: float
    text: str


class Label(NamedTuple):
    """Text at a place; `run` decides its colour."""

    x: float
    y: float
    text: str
    run: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """From values to places in the SVG."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False
    is_whole: bool = False  # its values are whole numbers, and so are the ticks

    def __call__(self, value: float) -> float:
        low, high, value = map(self._bend, (self.low, self.high, value))
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)

    def _bend(self, value: float) -> float:
        return math.log10(max(value, self.low / 1e3)) if self.is_log else value

    def ticks(self, count: int) -> list[float]:
        """About `count` round numbers in the range."""
        if self.is_log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
            few = self.high / self.low < 1e3
            steps = (1, 2, 5) if few else (1,)
            ticks = [s * 10.0**e for e in (*exponents, exponents.stop) for s in steps]
            ticks = [v for v in ticks if self.low <= v <= self.high]
            return ticks[:: math.ceil(len(ticks) / (count + 2))]
        step = round_up((self.high - self.low) / count)
        if self.is_whole:
            step = max(1, math.ceil(step))
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_up(step: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= step * (1 - 1e-9))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines in one pair of axes."""

    title: str
    unit: str
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    x_title: str = "optimizer step"
    note: str = ""
    from_zero: bool = False
    is_share: bool = False  # shown in percent
    x_is_log: bool = False
    may_be_log: bool = False
    x: Scale = field(init=False)
    y: Scale = field(init=False)

    def __post_init__(self):
        points = [p for line in self.lines for p in line.points if not math.isnan(p.y)]
        values = [p.y for p in points] + [level.y for level in self.levels]
        few = all(len(line.points) <= MOST_WHISKERS for line in self.lines if line.is_main)
        if few:
            main = [p for line in self.lines if line.is_main for p in line.points]
            values += [v for p in main for v in (p.low, p.high) if not math.isnan(v)]
        is_log = self.may_be_log and min(values) > 0 and max(values) > LARGE_RATIO * min(values)
        places = [p.x for p in points]
        low, high = widen(min(values), max(values), from_zero=self.from_zero, is_log=is_log)
        first, last = min(places), max(places)
        if first == last:
            first, last = (first / 2, last * 2) if self.x_is_log else (first - 1, last + 1)
        elif not self.x_is_log and first < 0.2 * last:
            first = min(first, 0)
        across = Scale(
            low=first, high=last, begin=LEFT, end=RIGHT, is_log=self.x_is_log, is_whole=True
        )
        object.__setattr__(self, "x", across)
        up = Scale(low=low, high=high, begin=BOTTOM, end=TOP, is_log=is_log)
        object.__setattr__(self, "y", up)

    @property
    def scale(self) -> str:
        """What stands beside the title."""
        return f"{self.unit}, logarithmic" if self.y.is_log else self.unit

    @property
    def x_ticks(self) -> list[Label]:
        ticks = self.x.ticks(4)
        digits = count_digits(ticks)
        return [Label(self.x(value), BOTTOM + 14, shorten(value, digits)) for value in ticks]

    @property
    def y_ticks(self) -> list[Label]:
        ticks = self.y.ticks(5)
        digits = count_digits(ticks)
        return [Label(LEFT - 6, self.y(value), self.show(value, digits)) for value in ticks]

    def show(self, value: float, digits: int = 4) -> str:
        """A value of the y axis as text."""
        if self.is_share:
            return f"{shorten(100 * value, digits)}\u00a0%"
        return shorten(value, digits)

    def path(self, line: Line) -> str:
        """The line, interrupted at gaps."""
        words = []
        is_down = False
        for point in line.points:
            if math.isnan(point.y):
                is_down = False
                continue
            words.append(f"{'L' if is_down else 'M'}{self.x(point.x):g},{self.y(point.y):g}")
            is_down = True
        return "".join(words)

    def area(self, line: Line) -> str:
        """The area between a line and the axis."""
        first = self.x(line.points[0].x)
        last = self.x(line.points[-1].x)
        return f"{self.path(line)}L{last:g},{BOTTOM}L{first:g},{BOTTOM}z"

    def band(self, line: Line) -> str:
        """The area from `low` to `high`, empty where whiskers show it or nothing is around it."""
        points = [p for p in line.points if not math.isnan(p.y)]
        if all(p.low == p.high for p in points) or self.has_whiskers(line):
            return ""
        there = [f"{self.x(p.x):g},{max(self.y(p.high), TOP):g}" for p in points]
        back = [f"{self.x(p.x):g},{min(self.y(p.low), BOTTOM):g}" for p in reversed(points)]
        return f"M{'L'.join(there + back)}z"

    def has_whiskers(self, line: Line) -> bool:
        return line.is_main and len(line.points) <= MOST_WHISKERS

    def whiskers(self, line: Line) -> str:
        """Vertical lines from `low` to `high`."""
        if not self.has_whiskers(line):
            return ""
        shown = [p for p in line.points if p.low < p.high]
        return "".join(f"M{self.x(p.x):g},{self.y(p.low):g}V{self.y(p.high):g}" for p in shown)

    def markers(self, line: Line) -> str:
        """Markers of the run's shape at a few points, the last among them."""
        points = [p for p in line.points if not math.isnan(p.y)]
        if not line.is_main or line.is_area or not points:
            return ""
        every = math.ceil(len(points) / MOST_MARKERS)
        shown = points[::-1][::every]
        shape = MARKERS[line.run % len(MARKERS)]
        return "".join(f"M{self.x(p.x):g},{self.y(p.y):g}{shape}" for p in shown)

    @property
    def ends(self) -> list[Label]:
        """The letter of each run, at the end of its most important line."""
        labels = {}
        for line in sorted(self.lines, key=lambda line: line.is_main):
            last = next((p for p in reversed(line.points) if not math.isnan(p.y)), None)
            if last is not None:
                place = self.x(last.x) + 7, self.y(last.y)
                labels[line.run] = Label(*place, LETTERS[line.run], line.run)
        return spread(list(labels.values()))

    @property
    def level_labels(self) -> list[Label]:
        labels = [Label(RIGHT - 3, self.y(level.y) - 4, level.text) for level in self.levels]
        return spread(labels)

    @property
    def readout(self) -> dict:
        """What a pointer on the chart shows: the values of each line at each x."""
        return {
            "x": [self.x.low, self.x.high],
            "log": self.x.is_log,
            "share": self.is_share,
            "lines": [
                {
                    "run": line.run,
                    "name": line.name,
                    "x": [significant(p.x) for p in line.points],
                    "y": [None if math.isnan(p.y) else significant(p.y) for p in line.points],
                }
                for line in self.lines
            ],
        }

    @property
    def summary(self) -> str:
        """The chart in words, for those who do not see it."""
        words = [
            f"{LETTERS[line.run]} {line.name}: from {self.show(seen[0])} to {self.show(seen[-1])}"
            for line in self.lines
            if (seen := [p.y for p in line.points if not math.isnan(p.y)])
        ]
        return f"{self.title}. {'; '.join(words)}"


def widen(low: float, high: float, *, from_zero: bool, is_log: bool) -> tuple[float, float]:
    """The range of an axis for values from `low` to `high`."""
    if is_log:
        return low / 1.2, high * 1.2
    if from_zero:
        low = min(low, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if from_zero and low == 0 else low - room), high + room


def spread(labels: list[Label]) -> list[Label]:
    """The same labels, moved up or down until no two of one column are nearer than SPACING."""
    placed: list[Label] = []
    for label in sorted(labels, key=lambda label: label.y):
        above = [other.y for other in placed if is_near(label, other)]
        placed.append(label._replace(y=max(label.y, max(above, default=TOP - SPACING) + SPACING)))
    lowest = [max(other.y for other in placed if is_near(label, other)) for label in placed]
    return [
        label._replace(y=round(label.y - max(0, low - BOTTOM), 1))
        for label, low in zip(placed, lowest, strict=True)
    ]


def is_near(one: Label, other: Label) -> bool:
    return abs(one.x - other.x) < 2 * SPACING


def thin(points: list[Point], most: int) -> list[Point]:
    """At most `most` points: each the mean of its neighbours, with their lowest and highest."""
    if len(points) <= most:
        return points
    bounds = [round(n * len(points) / most) for n in range(most + 1)]
    groups = [points[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    return [merge(group) for group in groups]


def merge(group: list[Point]) -> Point:
    known = [p for p in group if not math.isnan(p.y)]
    place = fmean(p.x for p in group)
    if not known:
        return Point(place, math.nan, math.nan, math.nan)
    low = min(p.low for p in known)
    high = max(p.high for p in known)
    return Point(place, fmean(p.y for p in known), low, high)


def count_digits(ticks: Sequence[float]) -> int:
    """Significant digits, four to seven, with which each is right to a tenth of the least gap."""
    gap = min((b - a for a, b in pairwise(ticks)), default=math.inf)
    shown = {n: [float(f"{tick:.{n}g}") for tick in ticks] for n in range(4, 7)}
    near = (n for n, rounded in shown.items() if math.dist(rounded, ticks) < gap / 10)
    return next(near, 7)


def shorten(value: float, digits: int = 4) -> str:
    """A number in few characters: 12k, 1.5M, 0.0012, 3e-06."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if suffix == "k" else size
            return f"{value / unit:.{digits}g}{suffix}"
    return format(value, f".{digits}g" if value and abs(value) < 1e-4 else f",.{digits}g")


def as_percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def significant(value: float) -> float:
    return float(f"{value:.7g}")
