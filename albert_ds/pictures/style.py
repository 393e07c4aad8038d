"""How every picture looks: told apart without colour, small files, what it reads checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By line style, marker and hatch; the greys and blues differ in lightness, so they print too.
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 4)))
MARKERS = ("o", "s", "^", "D", "v", "x")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")
COLORS = ("#0b3c5d", "#d1495b", "#328cc1", "#7a7a7a", "#edae49", "#2e8b57")
SHADES = 128  # colours kept in the file


def new_figure(panels: int = 1, *, width: float = 5.5, height: float = 4.0):
    """A figure with its axes side by side: (figure, list of axes)."""
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
    """Write a PNG with few colours: under 100 kB."""
    import io

    from matplotlib import pyplot
    from PIL import Image

    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png", bbox_inches="tight")
    pyplot.close(figure)
    drawn.seek(0)
    Image.open(drawn).convert("RGB").quantize(SHADES).save(output, "PNG", optimize=True)


def read_report(path: Path, *keys: str) -> dict:
    """A JSON object with at least these keys; UserError, naming the file, for anything else."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--input {path}: {error}") from None
    missing = [key for key in keys if not isinstance(report, dict) or key not in report]
    if missing:
        raise UserError(f"--input {path}: no {', '.join(missing)} in it")
    return report
