"""Pictures of runs, from their metrics.jsonl alone: losses and accuracies against steps.

Prints how far each run is from the first one, at the steps that both have logged.

python tools/plots.py --runs RUN [RUN ...] --output curves.png
"""

import argparse
import json
import sys
from pathlib import Path

from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser
from albert_ds.runtime.ending import say

# Told apart without colour: by line style and marker.
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
PANELS = (
    ("mlm_loss", "MLM loss (nats a masked token)"),
    ("mlm_accuracy", "MLM accuracy"),
    ("sop_loss", "SOP loss (nats a pair)"),
)


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/plots.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--runs", type=Path, nargs="+", required=True, metavar="RUN", help="run folders")
    add("--labels", nargs="+", help="their names in the legend (default: the folders')")
    add("--output", type=Path, required=True, metavar="PNG", help="picture to write")
    return parser


def read_metrics(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"--runs {run}: no metrics.jsonl there")
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw_curves(runs: list[Path], labels: list[str], output: Path) -> None:
    """One panel a quantity: a line for training windows, markers for held-out evaluations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(5 * len(PANELS), 4))
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        records = read_metrics(run)
        for axis, (key, title) in zip(axes, PANELS, strict=True):
            trained = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            held = [(r["step"], r[f"heldout_{key}"]) for r in records if f"heldout_{key}" in r]
            style, marker = STYLES[number % len(STYLES)], MARKERS[number % len(MARKERS)]
            (line,) = axis.plot(*zip(*trained, strict=True), style, label=label, linewidth=1.2)
            if held:
                axis.plot(
                    *zip(*held, strict=True),
                    marker,
                    label=f"{label}, held out",
                    color=line.get_color(),
                    markerfacecolor="none",
                    markersize=7 + 4 * number,
                )
            axis.set_xlabel("optimizer step")
            axis.set_ylabel(title)
            axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(output, dpi=120)


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


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    labels = args.labels or [run.name for run in args.runs]
    if len(labels) != len(args.runs):
        raise UserError(f"--labels: {len(labels)} for {len(args.runs)} runs; allowed: one each")
    draw_curves(args.runs, labels, args.output)
    for run, label in zip(args.runs[1:], labels[1:], strict=True):
        for key, difference in largest_differences(args.runs[0], run).items():
            print(f"{label} against {labels[0]}: {key} differs by {difference:.2g} at most")
    print(args.output)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
