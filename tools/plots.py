"""Pictures: of runs, of measurements, of predictions; told apart without colour.

    curves     losses and accuracies of runs against steps, from their metrics.jsonl; prints how far
               each run is from the first one, at the steps that both have logged
    speed-up   over the first model of a report against the link, from throughput_bench.py's JSON
    traffic    bytes that a rank sends in a step, by kind, from the same
    split      forward, backward, exposed communication, optimizer, from the same
    scaling    predicted speed-up against link and batch, from scaling_model.py predict's JSON
    layers     Figure 1, from probe.py --similarity's JSON

python tools/plots.py curves --runs RUN [RUN ...] --output curves.png
python tools/plots.py split --input bench.json --output split.png
"""

import argparse
import sys
from pathlib import Path

from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser
from albert_ds.pictures.style import read_report
from albert_ds.runtime.ending import say


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/plots.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    def command(name: str, meaning: str) -> Parser:
        added = commands.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        added.add_argument(
            "--output", type=Path, required=True, metavar="PNG", help="picture to write"
        )
        return added

    curves = command("curves", "losses and accuracies of runs against steps")
    curves.add_argument("--runs", type=Path, nargs="+", required=True, metavar="RUN", help="runs")
    curves.add_argument(
        "--labels", nargs="+", help="their names in the legend (default: the folders')"
    )
    for name, meaning in (
        ("speed-up", "samples/s over the yardstick's against the link"),
        ("traffic", "bytes that a rank sends in a step, by kind"),
        ("split", "the parts of a step, over the yardstick's whole"),
    ):
        added = command(name, meaning)
        added.add_argument(
            "--input", type=Path, nargs="+", required=True, help="reports of throughput_bench.py"
        )
        added.add_argument(
            "--only", metavar="KEY=VALUE,...", help="cells with these values, as in the JSON"
        )
    for name, meaning in (
        ("scaling", "predicted speed-up against link and batch"),
        ("layers", "distance and angle of each layer's input and output (Figure 1)"),
    ):
        command(name, meaning).add_argument("--input", type=Path, required=True, help="JSON")
    return parser


def plot_curves(args) -> None:
    from albert_ds.pictures.curves import draw_curves, largest_differences

    labels = args.labels or [run.stem if run.is_file() else run.name for run in args.runs]
    if len(set(labels)) != len(args.runs):
        raise UserError(
            f"--labels: {len(set(labels))} different ones for {len(args.runs)} runs; "
            "allowed: one each"
        )
    draw_curves(dict(zip(labels, args.runs, strict=True)), args.output)
    for run, label in zip(args.runs[1:], labels[1:], strict=True):
        for key, difference in largest_differences(args.runs[0], run).items():
            print(f"{label} against {labels[0]}: {key} differs by {difference:.2g} at most")


def plot_cells(args) -> None:
    from albert_ds.pictures import bench

    cells = [cell for path in args.input for cell in bench.read_cells(path)]
    only = dict(part.partition("=")[::2] for part in args.only.split(",")) if args.only else {}
    cells = bench.select(cells, only)
    match args.command:
        case "speed-up":
            bench.draw_speed_up(cells, args.output)
        case "traffic":
            bench.draw_traffic(cells, args.output)
        case "split":
            bench.draw_split(cells, args.output)


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    match args.command:
        case "curves":
            plot_curves(args)
        case "scaling":
            from albert_ds.pictures.scaling import draw_scaling

            draw_scaling(read_report(args.input, "rows")["rows"], args.output)
        case "layers":
            from albert_ds.pictures.layers import draw_layers

            draw_layers(read_report(args.input, "models")["models"], args.output)
        case _:
            plot_cells(args)
    print(args.output)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
