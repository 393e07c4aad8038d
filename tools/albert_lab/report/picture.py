"""Pictures: the report's charts as an SVG, or the same as a PNG; PNGs of few colours."""

import argparse
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from albert_ds.base import cli
from albert_ds.base.files import MARK, write_output
from albert_lab.report import chart
from albert_lab.report.chart import Chart, Line, Point

SHADES = 128  # colours in a PNG
ZOOM = 2  # pixels of a PNG for each unit of a chart
# Of a row of `albert-ds probe --num-layers LOW-HIGH`: title, unit, fields of its `Chart`.
DEPTHS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mlm_loss": ("MLM loss", "nats a masked token", {}),
    "mlm_accuracy": ("MLM accuracy", "of the masked tokens", {"is_share": True}),
    "l2": ("L2 distance", "from the output a depth before", {}),
    "degrees": ("Angle", "degrees, to the output a depth before", {}),
}


def picture(text: str) -> Path:
    """The name of a picture to write."""
    if not text.endswith((".svg", ".png")):
        raise argparse.ArgumentTypeError(f"{text}: must be a name that ends in .svg or .png")
    return cli.new_file(text)


def draw_depths(rows: Sequence[dict[str, float]]) -> list[Chart]:
    """A chart of each number of `albert-ds probe --num-layers LOW-HIGH`, against the depth."""

    def point(row: dict[str, float], key: str) -> Point:
        y = row[key]
        half = row[f"{key}_interval"]
        return Point(row["num_layers"], y, y - half, y + half)

    return [
        Chart(
            title=title,
            unit=unit,
            lines=[Line(run=0, name="held out", points=[point(row, key) for row in rows])],
            x_title="layers that run",
            **fields,
        )
        for key, (title, unit, fields) in DEPTHS.items()
    ]


def write_charts(
    charts: Sequence[Chart], output: Path, note: str, runs: Sequence[Any] = ()
) -> None:
    """Write charts beside each other, below the names of `runs` and a line that explains them."""
    from albert_lab.report.page import render

    svg = render("curves.svg", runs=runs, chart=chart, charts=charts, note=note)
    if output.suffix == ".svg":
        write_output(output, svg)
        return
    for module in ("matplotlib", "resvg_py"):
        cli.require(module, "plots", "a PNG")
    import matplotlib
    import resvg_py

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    drawn = resvg_py.svg_to_bytes(
        svg_string=_resolve_colours(svg),
        zoom=ZOOM,
        sans_serif_family="DejaVu Sans",
        font_files=[str(fonts / f"DejaVuSans{face}.ttf") for face in ("", "-Bold")],
    )
    write_png(drawn, output)


def _resolve_colours(svg: str) -> str:
    """The light colours in place of their names, which resvg does not know."""
    light = dict(re.findall(r"(--\w+): (#\w+);", svg.partition("@media")[0]))
    return re.sub(r"var\((--\w+)\)", lambda name: light[name[1]], svg)


def write_png(drawn: bytes, output: Path) -> None:
    """Write a PNG with SHADES colours, which keeps it under 100 kB."""
    from PIL import Image, PngImagePlugin

    small = io.BytesIO()
    mark = PngImagePlugin.PngInfo()
    mark.add_text("Comment", MARK)
    image = Image.open(io.BytesIO(drawn)).convert("RGB").quantize(SHADES)
    image.save(small, "PNG", optimize=True, pnginfo=mark)
    write_output(output, small.getvalue())
