"""Draw pictures of runs and measurements; lines differ in more than colour."""

from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.cli import Parser
from albert_ds.base.errors import UserError
from albert_ds.base.files import refuse_input
from albert_lab import plots
from albert_lab.report.picture import draw_depths, picture, write_charts

INTERVALS = "Strokes and bands: 95 % intervals"
CURVES = (
    "Thin lines are training, markers held-out values. "
    f"{INTERVALS}, or the range of merged records."
)


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    def command(name: str, meaning: str):
        add = commands.add_parser(name, help=meaning, description=meaning).add
        add("--output", "picture to write, .svg or .png", "PICTURE", picture, required=True)
        return add

    add = command("curves", "losses and accuracies of runs; prints the largest differences")
    add("--runs", "RUN folders, or metrics.jsonl files", "RUN", Path, nargs="+", required=True)
    legend = "names in the legend (default: the folders that differ)"
    add("--labels", legend, type=cli.utf8, nargs="+")
    for name, meaning in (
        ("traffic", "bytes that a rank sends in a step, by kind"),
        ("split", "the parts of a step, relative to the baseline's step"),
    ):
        add = command(name, meaning)
        text = "reports of `albert-ds bench`; the first model of a report is its baseline"
        add("--input", text, type=Path, nargs="+", required=True)
        text = "draw only cells with these values, as in the JSON (default: all cells)"
        add("--only", text, "KEY=VALUE,...")
    add = command("scores", "scores of models by the minutes of their training")
    add("--input", 'JSON: {"models": [{name, score, minutes or null}]}', type=Path, required=True)
    add = command(
        "steps", "milliseconds of steps that `albert-ds gpu-check` measured, side by side"
    )
    text = "results.jsonl of checks of the same kind of machine, the oldest first"
    add("--input", text, type=Path, nargs="+", required=True)
    add("--labels", "names in the legend, one for each", type=cli.utf8, nargs="+", required=True)
    add = command("layers", "distance and angle of each layer's input and output (Figure 1)")
    add("--input", "JSON of `albert-ds probe --similarity --output`", type=Path, required=True)
    add = command(
        "depths", "loss and accuracy of masked words at each depth, and how states change"
    )
    text = "JSON of `albert-ds probe --num-layers LOW-HIGH --output`"
    add("--input", text, type=Path, required=True)
    return parser


def plot_curves(args) -> None:
    from albert_lab.report.folder import name_runs, read_runs
    from albert_lab.report.page import draw_curves
    from albert_lab.report.panels import largest_differences

    labels = args.labels or name_runs(args.runs)
    if not len({*labels}) == len(labels) == len(args.runs):
        raise UserError(f"--labels {' '.join(labels)}: must be {len(args.runs)} different names")
    runs = read_runs(args.runs, labels)
    write_charts(draw_curves(runs), args.output, CURVES, runs)
    for run in runs[1:]:
        for key, (largest, steps) in largest_differences(runs[0], run).items():
            gap = f"{key} differs by {largest:.2g} at most" if steps else f"{key} is not compared"
            print(f"{run.name} against {runs[0].name}: {gap} (logged steps in common: {steps:,})")


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.command == "curves":
        plot_curves(args)
        print(args.output)
        return
    inputs = args.input if isinstance(args.input, list) else [args.input]
    refuse_input(args.output, inputs)  # a report of albert-ds too, but no picture
    if args.command == "steps":
        if not len({*args.labels}) == len(args.labels) == len(inputs):
            raise UserError(f"--labels {' '.join(args.labels)}: must be {len(inputs)} names")
        plots.draw_steps(
            dict(zip(args.labels, map(plots.read_steps, inputs), strict=True)), args.output
        )
    elif args.command == "scores":
        plots.draw_scores(plots.read_scores(args.input), args.output)
    elif args.command == "layers":
        plots.draw_layers(plots.read_models(args.input), args.output)
    elif args.command == "depths":
        write_charts(draw_depths(plots.read_depths(args.input)), args.output, f"{INTERVALS}.")
    else:
        cells = [cell for path in args.input for cell in plots.read_cells(path)]
        only = dict(part.partition("=")[::2] for part in args.only.split(",")) if args.only else {}
        draw = plots.draw_traffic if args.command == "traffic" else plots.draw_split
        draw(plots.select(cells, only), args.output)
    print(args.output)
