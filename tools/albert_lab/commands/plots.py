"""Draw pictures of runs, measurements and predictions; lines differ in more than colour."""

from pathlib import Path

from albert_ds import cli
from albert_ds.cli import Parser
from albert_ds.errors import UserError


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    def command(name: str, meaning: str):
        added = commands.add_parser(name, help=meaning, description=meaning)
        text = "picture to write"
        added.add_argument("--output", type=cli.new_file, required=True, metavar="PNG", help=text)
        return added.add_argument

    add = command("curves", "losses and accuracies of runs; prints the largest differences")
    text = "RUN folders, or metrics.jsonl files"
    add("--runs", type=Path, nargs="+", required=True, metavar="RUN", help=text)
    add("--labels", nargs="+", help="names in the legend (default: the folders that differ)")
    for name, meaning in (
        ("traffic", "bytes that a rank sends in a step, by kind"),
        ("split", "the parts of a step, relative to the baseline's step"),
    ):
        add = command(name, meaning)
        text = "reports of `albert-ds bench`; the first model of a report is its baseline"
        add("--input", type=Path, nargs="+", required=True, help=text)
        text = "draw only cells with these values, as in the JSON (default: all cells)"
        add("--only", metavar="KEY=VALUE,...", help=text)
    add = command("layers", "distance and angle of each layer's input and output (Figure 1)")
    add("--input", type=Path, required=True, help="JSON of `albert-ds probe --similarity --output`")
    return parser


def plot_curves(args) -> None:
    from albert_lab.plots.lines import draw_curves, largest_differences
    from albert_lab.runs import name_runs

    labels = args.labels or name_runs(args.runs)
    if len(set(labels)) != len(args.runs):
        raise UserError(
            f"--labels: {len(set(labels))} different labels for {len(args.runs)} runs; "
            "allowed: one for each run"
        )
    draw_curves(dict(zip(labels, args.runs, strict=True)), args.output)
    for run, label in zip(args.runs[1:], labels[1:], strict=True):
        for key, (largest, steps) in largest_differences(args.runs[0], run).items():
            difference = f"{key} differs by {largest:.2g} at most"
            print(f"{label} against {labels[0]}: {difference} (logged steps in common: {steps:,})")


def plot_cells(args) -> None:
    from albert_lab.plots import bench

    cells = [cell for path in args.input for cell in bench.read_cells(path)]
    only = dict(part.partition("=")[::2] for part in args.only.split(",")) if args.only else {}
    cells = bench.select(cells, only)
    draw = bench.draw_traffic if args.command == "traffic" else bench.draw_split
    draw(cells, args.output)


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    match args.command:
        case "curves":
            plot_curves(args)
        case "layers":
            from albert_lab.plots.lines import draw_layers, read_models

            draw_layers(read_models(args.input), args.output)
        case _:
            plot_cells(args)
    print(args.output)
