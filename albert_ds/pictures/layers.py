"""Figure 1: how far each layer moves its input, a line a checkpoint."""

from pathlib import Path

from albert_ds.errors import UserError
from albert_ds.pictures.style import COLORS, LINES, MARKERS, label, new_figure, save

PANELS = (
    ("l2", "L2 distance of input and output"),
    ("degrees", "angle of input and output (degrees)"),
)


def draw_layers(models: dict[str, dict], output: Path) -> None:
    """`models`: what tools/probe.py --similarity writes, a number a layer under l2 and degrees."""
    figure, axes = new_figure(len(PANELS), width=5)
    for axis, (key, title) in zip(axes, PANELS, strict=True):
        for number, (name, values) in enumerate(models.items()):
            if key not in values:
                raise UserError(f"--input: {name} has no {key}")
            axis.plot(
                range(1, len(values[key]) + 1),
                values[key],
                linestyle=LINES[number % len(LINES)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                color=COLORS[number % len(COLORS)],
                label=name,
            )
        label(axis, "layer", title)
    axes[0].legend(fontsize=8)
    save(figure, output)
