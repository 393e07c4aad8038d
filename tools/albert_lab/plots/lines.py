"""Line plots: curves of runs, layers of a model (Figure 1), predicted speed-ups."""

from __future__ import annotations

import math
from collections.abc import Set
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from albert_ds.cli import Number
from albert_ds.data.stream_config import list_pair_tasks
from albert_ds.errors import UserError
from albert_ds.json_files import check, read_json
from albert_lab.plots.style import label, line_style, new_figure, save
from albert_lab.runs import read_metrics

if TYPE_CHECKING:
    from albert_lab.sharing_study import Curve as StudyCurve

DISTANCES = (
    ("l2", "L2 distance of input and output"),
    ("degrees", "angle of input and output (degrees)"),
)


class Curve(NamedTuple):
    """A panel: one key of metrics.jsonl, and what guessing gives where that is known."""

    key: str
    title: str
    guessing: float | None = None


def list_curves(keys: Set[str]) -> list[Curve]:
    """The panels of runs whose records have `keys`: of pretraining, fine-tuning or both."""
    curves = [
        Curve("mlm_loss", "MLM loss (nats per masked token)"),
        Curve("mlm_accuracy", "MLM accuracy (share of masked tokens)"),
    ]
    for name, title in list_pair_tasks().items():
        curves.append(Curve(f"{name}_loss", f"{title} loss (nats per pair)", math.log(2)))
    tuned = sorted(key for key in keys if key.startswith("dev_"))
    if tuned:
        curves.append(Curve("loss", "training loss"))
        curves += [Curve(key, f"dev {key[4:]}") for key in tuned]
    return [curve for curve in curves if {curve.key, f"heldout_{curve.key}"} & keys]


def draw_curves(runs: dict[str, Path], output: Path) -> None:
    """A panel for each quantity: lines for training windows, markers for held-out evaluations."""
    found = {name: read_metrics(run) for name, run in runs.items()}
    curves = list_curves({key for records in found.values() for r in records for key in r})
    if not curves:
        raise UserError(f"--runs {' '.join(map(str, runs.values()))}: no record to draw yet")
    figure, axes = new_figure(len(curves), width=5)
    for number, (name, records) in enumerate(found.items()):
        style = line_style(number, markersize=7 + 4 * number)
        marks = {**style, "linestyle": "none", "markerfacecolor": "none"}
        for axis, (key, *_) in zip(axes, curves, strict=True):
            held_key = f"heldout_{key}"
            trained = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            held = [(r["step"], r[held_key]) for r in records if r.get(held_key) is not None]
            if trained:
                line = {**style, "linewidth": 1.2, "marker": None}
                if key.startswith("dev_"):
                    line |= {"marker": style["marker"], "markerfacecolor": "none"}
                axis.plot(*zip(*trained, strict=True), **line, label=name)
            if held:
                axis.plot(*zip(*held, strict=True), **marks, label=f"{name}, held out")
    for axis, (_, title, guessing) in zip(axes, curves, strict=True):
        label(axis, "optimizer step", title)
        if guessing is not None:
            axis.axhline(guessing, color="black", linewidth=0.8, linestyle=(0, (1, 2)))
            place = {"xy": (0.02, guessing), "xycoords": ("axes fraction", "data")}
            axis.annotate(f"a coin: {guessing:.3f}", **place, fontsize=8, va="bottom")
    axes[0].legend()
    save(figure, output)


def largest_differences(first: Path, other: Path) -> dict[str, tuple[float, int]]:
    """The largest absolute difference of each quantity, and how many steps both logged."""
    found = {}
    records = [read_metrics(run) for run in (first, other)]
    for key, *_ in list_curves({key for run in records for r in run for key in r}):
        one, two = ({r["step"]: r[key] for r in run if r.get(key) is not None} for run in records)
        if one or two:
            common = one.keys() & two.keys()
            largest = max((abs(one[step] - two[step]) for step in common), default=float("nan"))
            found[key] = largest, len(common)
    return found


def read_models(path: Path) -> dict[str, dict]:
    """The models in what probe.py --similarity --output wrote; UserError where it is not that."""
    report, name = read_json(path, f"--input {path}"), f"--input {path}"
    check(report, {"models": dict}, name)
    distances = {key: [Number()] for key, _ in DISTANCES}
    check(report["models"], dict.fromkeys(report["models"], distances), f"{name}: models")
    return report["models"]


def draw_layers(models: dict[str, dict], output: Path) -> None:
    """`models`: what tools/probe.py --similarity writes; a number per layer in l2 and degrees."""
    figure, axes = new_figure(len(DISTANCES), width=5)
    for axis, (key, title) in zip(axes, DISTANCES, strict=True):
        for number, (name, values) in enumerate(models.items()):
            axis.plot(range(1, len(values[key]) + 1), values[key], **line_style(number), label=name)
        axis.set_yscale("log")
        label(axis, "layer", title)
    axes[0].legend(fontsize=8)
    save(figure, output)


def draw_study(rows: dict[str, list[StudyCurve]], output: Path) -> None:
    """Held-out loss against parameters, FLOPs and bytes of gradients, each row's mean over seeds.

    Left, rows of one pattern (cycle-2, cycle-3) are joined. A bar is the range of the seeds, after
    the mean of all rows with that seed is taken away: it is of the data that the seed chose. The
    others begin after a third of the evaluations: before it all rows fall alike.
    """
    last = {name: [curve.losses[-1] for curve in curves] for name, curves in rows.items()}
    of_seed = [
        fmean(losses[seed] for losses in last.values() if seed < len(losses))
        for seed in range(max(map(len, last.values())))
    ]
    figure, (left, middle, right) = new_figure(3, width=5.5, height=5.5)
    families: dict[str, list[tuple[int, str]]] = {}
    for number, name in enumerate(rows):
        families.setdefault(name.rstrip("0123456789").rstrip("-"), []).append((number, name))
    for members in families.values():
        points = []
        for number, name in members:
            style, curves = line_style(number), rows[name]
            count = min(len(curve.steps) for curve in curves)
            seeds = zip(*(curve.losses[:count] for curve in curves), strict=True)
            losses, first = [fmean(found) for found in seeds], count // 3
            for axis, spent in ((middle, curves[0].flops), (right, curves[0].gradient_bytes)):
                axis.plot(spent[first:count], losses[first:], **{**style, "markevery": [-1]})
            over = [loss - mean for loss, mean in zip(last[name], of_seed, strict=False)]
            bar = [[fmean(over) - min(over)], [max(over) - fmean(over)]]
            place = curves[0].parameters, losses[-1]
            left.errorbar(*place, yerr=bar, **{**style, "linestyle": "none"}, label=name)
            points.append(place)
        left.plot(*zip(*sorted(points), strict=True), color="grey", linewidth=0.8, zorder=0)
    named = left.get_legend_handles_labels()
    figure.legend(*named, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    right.set_xscale("log")
    loss = "held-out MLM loss (nats)"
    label(left, "parameters", loss, "at the last step; bars: range of the seeds")
    label(middle, "FLOPs spent", loss)
    label(right, "bytes of gradients handed over by a replica", loss)
    save(figure, output)
