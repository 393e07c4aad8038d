"""The look of all pictures: readable without colour, small files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds import cli

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Line styles, markers and hatches differ, and so does the lightness of the colours.
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 4)))
MARKERS = ("o", "s", "^", "D", "v", "x")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")
COLORS = ("#0b3c5d", "#d1495b", "#328cc1", "#7a7a7a", "#edae49", "#2e8b57")
FILLS = ("white", "#9fb8cc", "#e9a3ad", "#dddddd", "#f6d899", "#a9cdb7")  # of bars
SHADES = 128  # colours in the file


def new_figure(panels: int = 1, *, width: float = 5.5, height: float = 4.0):
    """A figure with its axes side by side: (figure, list of axes)."""
    cli.require("matplotlib", "plots", "a picture")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width * panels, height), squeeze=False)
    return figure, list(axes[0])


def line_style(number: int, markersize: float = 4) -> dict:
    """Keyword arguments of `plot` for the line with this number; no two of 36 are alike."""
    turned = number + number // len(COLORS)
    return {
        "linestyle": LINES[turned % len(LINES)],
        "marker": MARKERS[turned % len(MARKERS)],
        "color": COLORS[number % len(COLORS)],
        "markersize": markersize,
    }


def label(axis: Axes, x: str, y: str, title: str = "") -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)


def save(figure: Figure, output: Path) -> None:
    """Write a PNG with SHADES colours, which keeps it under 100 kB."""
    import io

    from matplotlib import pyplot
    from PIL import Image

    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png", bbox_inches="tight")
    pyplot.close(figure)
    drawn.seek(0)
    Image.open(drawn).convert("RGB").quantize(SHADES).save(output, "PNG", optimize=True)
