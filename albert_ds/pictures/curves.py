"""Curves of runs, from their metrics.jsonl alone: losses and accuracies against steps."""

import json
from pathlib import Path

from albert_ds.errors import UserError
from albert_ds.pictures.style import COLORS, LINES, MARKERS, label, new_figure, save

PANELS = (
    ("mlm_loss", "MLM loss (nats a masked token)"),
    ("mlm_accuracy", "MLM accuracy (share of masked tokens)"),
    ("sop_loss", "SOP loss (nats a pair)"),
)


def read_metrics(run: Path) -> list[dict]:
    """The records of a run folder, or of its metrics.jsonl itself."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(f"--runs {run}: no metrics.jsonl there")
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw_curves(runs: dict[str, Path], output: Path) -> None:
    """One panel a quantity: a line for training windows, markers for held-out evaluations."""
    figure, axes = new_figure(len(PANELS), width=5)
    for number, (name, run) in enumerate(runs.items()):
        records, color = read_metrics(run), COLORS[number % len(COLORS)]
        for axis, (key, _) in zip(axes, PANELS, strict=True):
            trained = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            held = [(r["step"], r[f"heldout_{key}"]) for r in records if f"heldout_{key}" in r]
            style = {"linestyle": LINES[number % len(LINES)], "color": color}
            if trained:
                axis.plot(*zip(*trained, strict=True), **style, label=name, linewidth=1.2)
            if held:
                axis.plot(
                    *zip(*held, strict=True),
                    MARKERS[number % len(MARKERS)],
                    label=f"{name}, held out",
                    color=color,
                    markerfacecolor="none",
                    markersize=7 + 4 * number,
                )
    for axis, (_, title) in zip(axes, PANELS, strict=True):
        label(axis, "optimizer step", title)
    axes[0].legend()
    save(figure, output)


def largest_differences(first: Path, other: Path) -> dict[str, float]:
    """The largest absolute difference of each panel's quantity at steps that both runs logged."""
    found = {}
    for key, _ in PANELS:
        lines = [
            {r["step"]: r[key] for r in read_metrics(run) if r.get(key) is not None}
            for run in (first, other)
        ]
        common = lines[0].keys() & lines[1].keys()
        found[key] = max((abs(lines[0][s] - lines[1][s]) for s in common), default=float("nan"))
    return found
