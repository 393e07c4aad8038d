"""What tools/throughput_bench.py measured: speed-up against the link, bytes, parts of a step.

Everything is relative to the yardstick, the first model of the same report, in the same layout and
on the same link, so the seconds of one machine are nobody's result.
"""

import statistics
from pathlib import Path

from albert_ds.errors import UserError
from albert_ds.pictures.style import (
    COLORS,
    HATCHES,
    LINES,
    MARKERS,
    label,
    new_figure,
    read_report,
    save,
)

PARTS = {
    "forward": "forward",
    "backward": "backward",
    "communication": "exposed communication",
    "optimizer": "optimizer",
    "data_wait": "waiting for data",
    "other": "other",
}
# What two cells must have in common to be compared.
LAYOUT = (
    *("ranks", "nodes", "zero", "tensor_parallel", "precision", "micro_batch_size"),
    *("accumulation", "sequence_length", "activation_checkpointing"),
)


def read_cells(path: Path) -> list[dict]:
    """A report's cells, each with its report and its yardstick."""
    cells = read_report(path, "cells")["cells"]
    return [cell | {"report": path, "yardstick": cells[0]["model"]} for cell in cells]


def select(cells: list[dict], only: dict[str, str]) -> list[dict]:
    """Cells with these values. Raises UserError where none is left."""
    found = [c for c in cells if all(str(c.get(key)) == value for key, value in only.items())]
    if not found:
        wanted = ",".join(f"{key}={value}" for key, value in only.items())
        raise UserError(f"--only {wanted}: no cell is like that")
    return found


def draw_speed_up(cells: list[dict], output: Path) -> None:
    """Median, minimum and maximum over the rounds; a line a model and layout, a place a link."""
    figure, (axis,) = new_figure(width=9.5)
    links = _links(cells)
    lines: dict[tuple, list[tuple]] = {}
    for cell in cells:
        base = _yardstick(cells, cell)
        if base is None or base is cell:
            continue
        pairs = zip(cell["rounds"], base["rounds"], strict=False)
        ratios = [own["samples_a_second"] / other["samples_a_second"] for own, other in pairs]
        place = links.index(cell["link"])
        pair = f"{cell['model']} over {cell['yardstick']}"
        lines.setdefault((pair, *_layout(cell)), []).append((place, ratios))
    if not lines:
        raise UserError("--input: no model was measured beside another in the same layout")
    common, apart = _describe(cells)
    for number, ((pair, *layout), points) in enumerate(sorted(lines.items(), key=str)):
        points.sort()
        middles = [statistics.median(ratios) for _, ratios in points]
        low = [middle - min(r) for middle, (_, r) in zip(middles, points, strict=True)]
        high = [max(r) - middle for middle, (_, r) in zip(middles, points, strict=True)]
        axis.errorbar(
            [place for place, _ in points],
            middles,
            yerr=[low, high],
            capsize=3,
            linestyle=LINES[number % len(LINES)],
            marker=MARKERS[number % len(MARKERS)],
            color=COLORS[number % len(COLORS)],
            label=_name(pair, apart[tuple(layout)]),
        )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(links)), [link or "no limit" for link in links])
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    label(axis, "link between the nodes", "samples/s, over the yardstick's", common)
    save(figure, output)


def draw_traffic(cells: list[dict], output: Path) -> None:
    """Bytes that a rank sends in a step, by kind, a group of bars a model and layout."""
    common, apart = _describe(cells)
    groups = {_name(c["model"], apart[_layout(c)]): c["rounds"][-1]["kinds"] for c in cells}
    kinds = list(dict.fromkeys(kind for found in groups.values() for kind in found))
    if not kinds:
        raise UserError("--input: no cell moved anything; it needs cells of several ranks")
    figure, (axis,) = new_figure(width=7, height=1 + 0.22 * len(groups) * (1 + len(kinds)))
    height = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        sent = [found.get(kind, {}).get("wire_bytes", 0) / 1e6 for found in groups.values()]
        places = [place + (number - (len(kinds) - 1) / 2) * height for place in range(len(groups))]
        bars = axis.barh(
            places, sent, height, hatch=HATCHES[number], color=_pale(number), edgecolor="black"
        )
        bars.set_label(kind)
        axis.bar_label(bars, [_short(size) for size in sent], fontsize=7)
    axis.set_yticks(range(len(groups)), list(groups), fontsize=7)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(right=axis.get_xlim()[1] * 3)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    label(axis, "MB that a rank sends in an optimizer step (logarithmic)", "", common)
    save(figure, output)


def draw_split(cells: list[dict], output: Path) -> None:
    """The parts of a step, a bar a cell; 1 is the yardstick's whole step on the same link."""
    shown = [(cell, _yardstick(cells, cell)) for cell in cells]
    shown = [(cell, base) for cell, base in shown if base is not None]
    if not shown:
        raise UserError("--input: the first model of the report is not among the cells")
    shown.sort(
        key=lambda pair: (
            pair[0]["yardstick"],
            str(_layout(pair[0])),
            -(pair[0]["link_bits_per_second"] or 1e99),
        )
    )
    figure, (axis,) = new_figure(width=8, height=1.2 + 0.36 * len(shown))
    common, apart = _describe(cells)
    names = [_name(c["model"], apart[_layout(c)], c["link"] or "no limit") for c, _ in shown]
    left = [0.0] * len(shown)
    for number, (part, title) in enumerate(PARTS.items()):
        share = [_median(cell, f"{part}_seconds") / _median(base) for cell, base in shown]
        axis.barh(
            range(len(shown)),
            share,
            left=left,
            height=0.7,
            hatch=HATCHES[number],
            color=_pale(number),
            edgecolor="black",
            label=title,
        )
        left = [a + b for a, b in zip(left, share, strict=True)]
    axis.set_yticks(range(len(shown)), names, fontsize=7)
    axis.invert_yaxis()
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    label(axis, "step, over the yardstick's on the same link", "", common)
    save(figure, output)


def _median(cell: dict, key: str = "seconds_a_step") -> float:
    return statistics.median(turn[key] for turn in cell["rounds"])


def _layout(cell: dict) -> tuple:
    return tuple(cell[key] for key in LAYOUT)


def _yardstick(cells: list[dict], cell: dict) -> dict | None:
    """The yardstick's cell of the same report, layout and link; None where it was not measured."""
    for other in cells:
        same = _layout(other) == _layout(cell) and other["link"] == cell["link"]
        if same and other["report"] == cell["report"] and other["model"] == cell["yardstick"]:
            return other
    return None


def _links(cells: list[dict]) -> list[str | None]:
    """Slowest first, without a limit last."""
    rates = {cell["link"]: cell["link_bits_per_second"] or float("inf") for cell in cells}
    return sorted(rates, key=lambda link: rates[link])


def _describe(cells: list[dict]) -> tuple[str, dict[tuple, str]]:
    """What all layouts have in common, and what tells each of them from the others."""
    layouts = list(dict.fromkeys(map(_layout, cells)))
    varies = {
        key
        for key, values in zip(LAYOUT, zip(*layouts, strict=True), strict=True)
        if len(set(values)) > 1
    }
    return (
        _in_words(layouts[0], set(LAYOUT) - varies),
        {layout: _in_words(layout, varies) for layout in layouts},
    )


def _in_words(layout: tuple, shown: set[str]) -> str:
    found = dict(zip(LAYOUT, layout, strict=True))
    words = {
        "ranks": f"{found['ranks']} ranks",
        "nodes": f"{found['nodes']} node{'s' * (found['nodes'] > 1)}",
        "zero": f"ZeRO-{found['zero']}",
        "tensor_parallel": f"TP {found['tensor_parallel']}",
        "precision": found["precision"],
        "micro_batch_size": f"micro-batch {found['micro_batch_size']}",
        "accumulation": f"accumulation {found['accumulation']}",
        "sequence_length": f"{found['sequence_length']} tokens",
        "activation_checkpointing": f"checkpointing {found['activation_checkpointing']}",
    }
    return ", ".join(words[key] for key in LAYOUT if key in shown)


def _name(model: str, *more: str) -> str:
    return ", ".join([model, *filter(None, more)])


def _short(size: float) -> str:
    return "" if not size else f"{size:,.0f}" if size >= 100 else f"{size:.2g}"


def _pale(number: int) -> str:
    return ("white", "#9fb8cc", "#e9a3ad", "#dddddd", "#f6d899", "#a9cdb7")[number % 6]
