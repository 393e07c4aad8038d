"""Pictures of benchmarks' reports and of a model's layers; they are readable without colour.

Times are relative to the baseline: the first model of the same report, in the same layout. Seconds
of one machine alone would mean little.
"""

from __future__ import annotations

import io
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.base import cli
from albert_ds.base.cli import Range, positive
from albert_ds.base.errors import UserError
from albert_ds.base.files import MARK, write_output
from albert_ds.base.json_files import check, parse_json, read_bytes, read_json
from albert_lab.report.picture import DEPTHS, write_png
from albert_lab.tables import PARTS, read_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Line styles, markers and hatches differ, and so does the lightness of the colours.
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 4)))
MARKERS = ("o", "s", "^", "D", "v", "x")
COLORS = ("#0b3c5d", "#d1495b", "#328cc1", "#7a7a7a", "#edae49", "#2e8b57")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")
FILLS = ("white", "#9fb8cc", "#e9a3ad", "#dddddd", "#f6d899", "#a9cdb7")  # of bars
DISTANCES = (
    ("l2", "L2 distance of input and output"),
    ("degrees", "angle of input and output (degrees)"),
)
# The layout: fields in which two cells must agree to be compared, and how a picture names them.
LAYOUT = {
    "ranks": "{} ranks",
    "zero": "ZeRO-{}",
    "tensor_parallel": "TP {}",
    "precision": "{}",
    "micro_batch_size": "micro-batch {}",
    "accumulation": "accumulation {}",
    "sequence_length": "{} tokens",
    "activation_checkpointing": "checkpointing {}",
    "deepspeed_config": "{.stem}",
    "link": "link {}",  # between emulated nodes, in reports recorded before 26 November 2026
}
CELL = {  # of gpu-check's piece `speed`
    "size": str,
    "micro": positive,
    "checkpointing": str,
    "found": dict.fromkeys(("step_seconds", "fastest", "slowest"), Range(gt=0)),
}
GRAPH_CELL = {  # of its piece `graphs`, always of base
    "micro": positive,
    "found": dict.fromkeys(("step_ms", "p90_ms"), Range(gt=0)) | {"by_graph": Range()},
}
LEGEND = {"fontsize": 7, "loc": "upper left", "bbox_to_anchor": (1.01, 1)}


def read_cells(path: Path) -> list[dict]:
    """A report's cells; `base` is the baseline's cell, None where it was not measured."""
    entries = read_report(path)["cells"]
    cells = [cell | {"deepspeed_config": Path(cell["deepspeed_config"])} for cell in entries]
    bases = {layout_of(c): c for c in cells if c["model"] == cells[0]["model"]}
    return [cell | {"base": bases.get(layout_of(cell))} for cell in cells]


def select(cells: list[dict], only: dict[str, str]) -> list[dict]:
    """Cells with these values. Raises UserError where none is left."""
    selection = [c for c in cells if all(str(c.get(key)) == value for key, value in only.items())]
    if not selection:
        wanted = ",".join(f"{key}={value}" for key, value in only.items())
        raise UserError(f"--only {wanted}: no cell has these values")
    return selection


def draw_traffic(cells: list[dict], output: Path) -> None:
    """Bytes that a rank sends in a step, a bar per model and layout; its parts are the kinds."""
    common, names = describe_layouts(cells)
    groups = [c["rounds"][-1]["kinds"] for c in cells]
    kinds = list(dict.fromkeys(kind for group in groups for kind in group))
    if not kinds:
        raise UserError(
            "--input: no cell has traffic; allowed: reports with cells of several ranks"
        )
    figure, (axis,) = new_figure(width=7, height=1.2 + 0.36 * len(groups))
    left = [0.0] * len(groups)
    for number, kind in enumerate(kinds):
        sent = [group.get(kind, {}).get("wire_bytes", 0) / 1e6 for group in groups]
        bars = _draw_bars(axis, number, range(len(groups)), sent, left=left, height=0.7, label=kind)
        left = [a + b for a, b in zip(left, sent, strict=True)]
    axis.bar_label(bars, [f" {total:,.0f}" for total in left], fontsize=7)
    axis.set_xlim(right=max(left) * 1.15)
    _finish_bars(axis, [join(c["model"], names[layout_of(c)]) for c in cells])
    label(axis, "MB that a rank sends in an optimizer step", "", common)
    save(figure, output)


def draw_split(cells: list[dict], output: Path) -> None:
    """The parts of a step, a bar per cell; 1 is the baseline's whole step."""
    shown = [cell for cell in cells if cell["base"] is not None]
    if not shown:
        raise UserError("--input: no cell's layout was measured with the report's first model")
    shown.sort(key=lambda cell: str(layout_of(cell)))
    figure, (axis,) = new_figure(width=8, height=1.2 + 0.36 * len(shown))
    common, names = describe_layouts(shown)
    left = [0.0] * len(shown)
    for number, (part, title) in enumerate(PARTS.items()):
        share = [_mean_share(cell, f"{part}_seconds") for cell in shown]
        _draw_bars(axis, number, range(len(shown)), share, left=left, height=0.7, label=title)
        left = [a + b for a, b in zip(left, share, strict=True)]
    _finish_bars(axis, [join(c["model"], names[layout_of(c)]) for c in shown])
    label(axis, "step, over the baseline's (mean of the rounds)", "", common)
    save(figure, output)


def layout_of(cell: dict) -> tuple:
    return tuple(cell.get(key) for key in LAYOUT)


def describe_layouts(cells: list[dict]) -> tuple[str, dict[tuple, str]]:
    """In words: the fields that all layouts share, and for each layout the fields that differ."""
    layouts = list(dict.fromkeys(map(layout_of, cells)))
    varies = [len(set(values)) > 1 for values in zip(*layouts, strict=True)]

    def describe(layout: tuple, *, varying: bool) -> str:
        fields = zip(LAYOUT.values(), layout, varies, strict=True)
        return ", ".join(
            form.format(value) for form, value, v in fields if v == varying and value is not None
        )

    return describe(layouts[0], varying=False), {
        layout: describe(layout, varying=True) for layout in layouts
    }


def join(*words: str) -> str:
    return ", ".join(filter(None, words))


def _mean_share(cell: dict, key: str) -> float:
    """Mean over the rounds of a part, over the baseline's step of the same round.

    Means add up: the parts of the baseline are 1 together. Medians would not.
    """
    rounds = zip(cell["rounds"], cell["base"]["rounds"], strict=False)
    return statistics.fmean(own[key] / base["seconds_a_step"] for own, base in rounds)


def _draw_bars(axis, number: int, places, sizes: list[float], **options):
    style = {"hatch": HATCHES[number], "color": FILLS[number % len(FILLS)], "edgecolor": "black"}
    return axis.barh(places, sizes, **style, **options)


def _finish_bars(axis, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.legend(**LEGEND)


def read_scores(path: Path) -> list[dict]:
    """The models of a JSON, {"models": [...]}: name and score in percent, minutes if known."""
    report = read_json(path, f"--input {path}")
    name = f"--input {path}"
    score = {"name": str, "score": Range(gt=0, le=100), "minutes": (None, Range(gt=0))}
    check(report, {"models": [score]}, name)
    return report["models"]


def draw_scores(models: list[dict], output: Path) -> None:
    """A point for each model whose minutes are known, a line for the others."""
    figure, (axis,) = new_figure(width=8)
    trained = [model for model in models if model["minutes"] is not None]
    for number, model in enumerate(trained):
        place = (model["minutes"], model["score"])
        look = number % len(MARKERS)
        axis.plot(*place, marker=MARKERS[look], color=COLORS[look], markersize=8, linestyle="none")
        text = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 8}
        axis.annotate(model["name"], place, **text)
    axis.set_xscale("log")
    axis.set_xlim(1, 1000)
    beside = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 7}
    for model in models:
        if model["minutes"] is None:
            axis.axhline(model["score"], color="#7a7a7a", linestyle=":", linewidth=1)
            axis.text(1.01, model["score"], model["name"], **beside)
    label(axis, "minutes of training", "minimal pairs told apart, %")
    save(figure, output)


def read_steps(path: Path) -> dict[str, dict]:
    """What gpu-check measured of each cell, by the name of the cell; UserError where it did not."""
    name = f"--input {path}, results.jsonl of `albert-ds gpu-check`"
    cells = {}
    for line in read_bytes(path, name).splitlines():
        record = parse_json(line, name)
        cell: dict = record.get("found") or {}
        text = ", text" if record.get("rows") == "text" else ""
        if record.get("kind") == "graph speed" and record.get("by") == "graphs":
            check(record, GRAPH_CELL, name)
            if not cell["by_graph"]:  # all ran eagerly
                continue
            step, late = cell["step_ms"] / 1e3, cell["p90_ms"] / 1e3
            times = {"step_seconds": step, "fastest": step, "slowest": late}
            cells[f"albert-base, {record['micro']}{text}"] = times
        # Without the kernels' bound the cell is one that users have.
        elif record.get("kind") == "speed" and cell and "kernels_from" not in record:
            check(record, CELL, name)
            again = f", {record['checkpointing']}" if record["checkpointing"] != "none" else ""
            cells[f"{record['size']}, {record['micro']}{again}{text}"] = cell
    if not cells:
        raise UserError(f"{name}: has no record of `speed` or `graphs`")
    return cells


def draw_steps(checks: dict[str, dict[str, dict]], output: Path) -> None:
    """A row for each cell, of each check the median step, its range, and what its kernels take."""
    names = list(dict.fromkeys(name for cells in checks.values() for name in cells))
    names.sort(key=lambda name: max(c[name]["step_seconds"] for c in checks.values() if name in c))
    figure, (axis,) = new_figure(width=7, height=1.2 + 0.36 * len(names))
    for number, (title, cells) in enumerate(checks.items()):
        places = [names.index(name) + 0.3 * (number - (len(checks) - 1) / 2) for name in cells]
        middle, low, high = (
            [1e3 * cell[key] for cell in cells.values()]
            for key in ("step_seconds", "fastest", "slowest")
        )
        look = number % len(MARKERS)
        style = {"color": COLORS[look], "marker": MARKERS[look], "linestyle": "none"}
        axis.hlines(places, low, high, colors=COLORS[look])
        axis.plot(middle, places, **style, markersize=5, label=f"{title}: median, range")
        kernels = [cell.get("profile", {}).get("kernel_us") for cell in cells.values()]
        known = [(us / 1e3, place) for us, place in zip(kernels, places, strict=True) if us]
        if known:
            marks = {**style, "marker": "|", "markersize": 11}
            axis.plot(*zip(*known, strict=True), **marks, label=f"{title}: its kernels")
    axis.set_xscale("log")
    _finish_bars(axis, names)
    label(axis, "ms of a step of two micro-batches", "", "size, sequences of a micro-batch")
    save(figure, output)


def read_models(path: Path) -> dict[str, dict]:
    """The models in what probe.py --similarity --output wrote; UserError where it is not that."""
    report = read_json(path, f"--input {path}")
    name = f"--input {path}"
    check(report, {"models": dict}, name)
    distances = {key: [Range()] for key, _ in DISTANCES}
    check(report["models"], dict.fromkeys(report["models"], distances), f"{name}: models")
    return report["models"]


def draw_layers(models: dict[str, dict], output: Path) -> None:
    """`models`: what tools/probe.py --similarity writes; a number per layer in l2 and degrees."""
    figure, axes = new_figure(len(DISTANCES), width=5)
    for axis, (key, title) in zip(axes, DISTANCES, strict=True):
        for number, (name, values) in enumerate(models.items()):
            look = number % len(LINES)
            style = {"linestyle": LINES[look], "marker": MARKERS[look], "color": COLORS[look]}
            layers = range(1, len(values[key]) + 1)
            axis.plot(layers, values[key], **style, markersize=4, label=name)
        axis.set_yscale("log")
        label(axis, "layer", title)
    axes[0].legend(fontsize=8)
    save(figure, output)


def read_depths(path: Path) -> list[dict]:
    """The rows of what `albert-ds probe --num-layers LOW-HIGH --output` wrote; else UserError."""
    report = read_json(path, f"--input {path}")
    name = f"--input {path}"
    keys = ("num_layers", *DEPTHS, *(f"{key}_interval" for key in DEPTHS))
    check(report, {"depths": [dict.fromkeys(keys, Range())]}, name)
    return report["depths"]


def new_figure(panels: int = 1, *, width: float = 5.5, height: float = 4.0):
    """A figure with its axes side by side: (figure, list of axes)."""
    cli.require("matplotlib", "plots", "a picture")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width * panels, height), squeeze=False)
    return figure, list(axes[0])


def label(axis: Axes, x: str, y: str, title: str = "") -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)


def save(figure: Figure, output: Path) -> None:
    """Write the figure as its name ends: a PNG, or an SVG."""
    from matplotlib import pyplot

    figure.tight_layout()
    drawn = io.BytesIO()
    kind = output.suffix.removeprefix(".")
    facts = {"Description": MARK}
    figure.savefig(drawn, dpi=110, format=kind, bbox_inches="tight", metadata=facts)
    pyplot.close(figure)
    if kind == "svg":
        write_output(output, drawn.getvalue())
    else:
        write_png(drawn.getvalue(), output)
