"""Runs that differ in their seed alone: bands over the seeds, means, differences seed by seed.

A seed fixes the data, the masks and what is held out, so two settings are compared seed by seed:
the interval of a mean difference is much narrower than those of the two means.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t

from albert_lab.report.chart import Chart, Line, Point
from albert_lab.report.folder import RunFolder
from albert_lab.report.panels import Panel, list_losses
from albert_lab.report.table import Table

FREE = ("command", "output", "seed", "versions")  # keys in which seeds of one setting may differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Runs of one configuration, by seed."""

    runs: Mapping[int, RunFolder]

    @property
    def first(self) -> RunFolder:
        return next(iter(self.runs.values()))

    @property
    def name(self) -> str:
        """The folder in which all of them lie, or the first run, with the letters of the runs."""
        folders = {run.path.absolute().parent.name for run in self.runs.values()}
        name = folders.pop() if len(folders) == 1 else self.first.name
        return f"{name} ({''.join(run.letter for run in self.runs.values())})"

    def last(self, key: str) -> dict[int, float]:
        """The last value of each seed that has one."""
        values = {seed: run.last(key) for seed, run in self.runs.items()}
        return {seed: value for seed, value in values.items() if value is not None}


def find_settings(runs: Sequence[RunFolder]) -> tuple[list[Setting], list[str]]:
    """Those with several seeds, and notes about runs that are counted with none."""
    groups: dict[str, dict[int, RunFolder]] = {}
    notes = []
    for run in runs:
        seed = run.config.get("seed")
        if not isinstance(seed, int):
            continue
        config = {key: value for key, value in run.config.items() if key not in FREE}
        if isinstance(stream := config.get("stream"), dict):
            config["stream"] = {key: stream[key] for key in stream if key != "seed"}
        seeds = groups.setdefault(json.dumps(config, sort_keys=True), {})
        if seed in seeds:
            notes.append(f"{run.name}: of one configuration and seed with {seeds[seed].name}")
        seeds.setdefault(seed, run)
    return [Setting(runs=seeds) for seeds in groups.values() if len(seeds) > 1], notes


def draw_bands(settings: Sequence[Setting]) -> list[Chart]:
    """A chart of every held-out or dev value: the mean of the seeds, and from lowest to highest."""
    charts = []
    for key, panel in list_keys(settings):
        lines = [
            Line(run=each.first.number, name=f"mean of {len(each.runs)} seeds", points=points)
            for each in settings
            if (points := average(each, key))
        ]
        title = f"{panel.title} over seeds"
        charts.append(Chart(title=title, unit=panel.unit, lines=lines, **panel.fields))
    return charts


def average(setting: Setting, key: str) -> list[Point]:
    """At the steps of which every seed has a value: mean, lowest and highest."""
    curves = [
        {step: value for step, value in run.values(key) if not math.isnan(value)}
        for run in setting.runs.values()
    ]
    steps = sorted(set.intersection(*map(set, curves)))
    values = [(step, [curve[step] for curve in curves]) for step in steps]
    return [Point(step, statistics.fmean(x), min(x), max(x)) for step, x in values]


def list_keys(settings: Sequence[Setting]) -> Iterator[tuple[str, Panel]]:
    """Keys of held-out and dev values that a setting has in steps of all its seeds."""
    for is_tuned in (False, True):
        some = [each for each in settings if each.first.is_finetuning == is_tuned]
        for panel in list_losses([each.first for each in some]) if some else ():
            key = panel.key if is_tuned else f"heldout_{panel.key}"
            if key != "loss" and any(average(each, key) for each in some):
                yield key, panel


def list_means(settings: Sequence[Setting]) -> Table:
    """The last values of each setting."""
    header = ["setting", "value", "seeds", "mean", "\u00b1 95 %", "lowest", "highest"]
    rows = [
        [each.name, key, *describe([*values.values()])]
        for each in settings
        for key, _ in list_keys(settings)
        if (values := each.last(key))
    ]
    return Table(header=header, rows=rows)


def list_differences(settings: Sequence[Setting]) -> Table:
    """Each setting minus the first of its kind, for the seeds that both have."""
    header = ["setting", "minus", "value", "seeds", "mean", "\u00b1 95 %", "lowest", "highest"]
    rows = []
    for each in settings:
        first = next(x for x in settings if x.first.is_finetuning == each.first.is_finetuning)
        for key, _ in list_keys(settings) if each is not first else ():
            own, other = each.last(key), first.last(key)
            gaps = [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]
            if gaps:
                rows.append([each.name, first.name, key, *describe(gaps)])
    return Table(header=header, rows=rows)


def describe(values: Sequence[float]) -> list[str]:
    """Number, mean, half of its 95 % interval, lowest, highest."""
    mean, half = mean_interval(values)
    shown = (mean, half, min(values), max(values))
    return [str(len(values)), *("" if math.isnan(x) else f"{x:.6g}" for x in shown)]


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its 95 % interval, by Student's t; NaN of a single value."""
    mean = statistics.fmean(values)
    number = len(values)
    if number == 1:
        return mean, math.nan
    error = statistics.stdev(values) / number**0.5
    return mean, float(t.ppf(0.975, number - 1)) * error
