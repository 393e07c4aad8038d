"""Compare what layers share: one table with intervals, one picture (slurm/ablations/sharing.sh).

A row is a folder with a run per seed (seed-1, seed-2, ...). Held-out losses are those of the last
step, of the point with as many FLOPs as the row with the fewest has spent, and of the point with as
much time as the fastest row has taken; between evaluations they are interpolated. Rows with equal
parameters stand together. A cell is the mean over the seeds, with its 95 % interval (Student's t).
A seed fixes the data, the masks and what is held out, so --against compares seed by seed, in a
table of its own: the interval of a mean difference is much narrower than those of the two means.
"""

import json
import statistics
from pathlib import Path

from albert_lab.sharing_study import Curve, list_costs, read_curve
from albert_lab.tables import table

from albert_ds import cli
from albert_ds.cli import Parser
from albert_ds.errors import UserError
from albert_ds.files import write_file

COLUMNS = {  # of the table, and the field of a row
    "parameters": "parameters",
    "MFLOPs a token": "flops_a_token",
    "tokens/s": "tokens_a_second",
    "gradient MB a step": "gradient_bytes",
    "layers a step": "layers_a_step",
    "MLM loss": "loss",
    "at equal FLOPs": "loss_at_flops",
    "at equal time": "loss_at_time",
    "bits a byte": "bits",
    "MLM accuracy": "mlm",
    "SOP accuracy": "sop",
    "NSP accuracy": "nsp",
    "BLiMP": "blimp",
}
COMPARED = {  # of the table of differences
    title: COLUMNS[title]
    for title in ("MLM loss", "bits a byte", "MLM accuracy", "SOP accuracy", "BLiMP")
}
UNITS = {"flops_a_token": 1e6, "gradient_bytes": 1e6}
DECIMALS = {
    "parameters": 0,
    "tokens_a_second": 0,
    "gradient_bytes": 2,
    "flops_a_token": 2,
    "layers_a_step": 1,
}


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/sharing_table.py", description=__doc__)
    add = parser.add_argument
    add(
        "--rows",
        nargs="+",
        required=True,
        type=cli.path,
        metavar="NAME=DIR",
        help="rows of the table: a name, and a folder with one run per seed",
    )
    text = "row that the others are compared with, seed by seed (default: none)"
    add("--against", metavar="NAME", help=text)
    add("--output", type=cli.new_file, metavar="FILE", help="JSON with the same numbers")
    add("--picture", type=cli.new_file, metavar="PNG", help="file to draw the losses into")
    return parser


def summarise(curves: list[Curve], flops: float, seconds: float) -> dict[str, list[float]]:
    """The fields of a row, a value a seed; `flops` and `seconds` are the common budgets."""
    found = {
        **{name: [cost] * len(curves) for name, cost in list_costs(curves[0]).items()},
        "tokens_a_second": [curve.tokens_a_second for curve in curves],
        "layers_a_step": [curve.layers_a_step for curve in curves],
        "loss_at_flops": [curve.loss_at(flops, curve.flops) for curve in curves],
        "loss_at_time": [curve.loss_at(seconds, curve.seconds) for curve in curves],
    }
    for name in ("loss", "bits", "mlm", "sop", "nsp", "blimp"):
        found[name] = [x for curve in curves if (x := getattr(curve, name)) is not None]
    return {name: values for name, values in found.items() if values}


def compare(curves: dict[str, Curve], reference: dict[str, Curve]) -> dict[str, list[float]]:
    """Each field of COMPARED minus the reference's, for the seeds in which both have it."""
    found = {}
    for field in COMPARED.values():
        pairs = [
            (getattr(curves[seed], field), getattr(reference[seed], field))
            for seed in curves
            if seed in reference
        ]
        found[f"{field}_difference"] = [x - y for x, y in pairs if None not in (x, y)]
    return {name: values for name, values in found.items() if values}


def as_cell(field: str, values: list[float] | None) -> str:
    """Mean and half of its 95 % interval; the mean alone of one seed or of equal values."""
    if not values:
        return "-"
    from scipy.stats import t

    decimals, unit = DECIMALS.get(field, 3), UNITS.get(field, 1)
    mean = f"{statistics.mean(values) / unit:,.{decimals}f}"
    if len({*values}) == 1:
        return mean
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{mean} +- {t.ppf(0.975, len(values) - 1) * error / unit:.{decimals}f}"


def draw(found: dict[str, dict[str, list[float]]], columns: dict[str, str]) -> str:
    """The rows by parameters, and those of the columns that a row has."""
    shown = {title: f for title, f in columns.items() if any(f in x for x in found.values())}
    ordered = sorted(found, key=lambda name: found[name]["parameters"][0])
    lines = [[n, *(as_cell(f, found[n].get(f)) for f in shown.values())] for n in ordered]
    return table(["", *shown], lines)


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    rows: dict[str, dict[str, Curve]] = {}  # of each row, by seed
    for given in args.rows:
        name, equals, folder = given.partition("=")
        runs = sorted(Path(folder).glob("seed-*")) if name and equals else []
        if not runs:
            raise UserError(f"--rows {given}: must be NAME=DIR with a run DIR/seed-N")
        rows[name] = {run.name: read_curve(run) for run in runs}
    if args.against and args.against not in rows:
        raise UserError(f"--against {args.against}: must be one of {', '.join(rows)}")
    every = [curve for curves in rows.values() for curve in curves.values()]
    flops, seconds = (min(spent) for spent in zip(*(c.spent for c in every), strict=True))
    found = {name: summarise([*curves.values()], flops, seconds) for name, curves in rows.items()}
    for name, curves in rows.items():
        if args.against and name != args.against:
            found[name] |= compare(curves, rows[args.against])
    print(draw(found, COLUMNS))
    if args.against:
        compared = {title: f"{field}_difference" for title, field in COMPARED.items()}
        print(f"\nMinus {args.against}, seed by seed:\n")
        print(draw({name: x for name, x in found.items() if name != args.against}, compared))
    steps = sorted({curve.steps[-1] for curve in every})
    seeds = sorted({len(curves) for curves in rows.values()})
    print(f"\nSteps {steps}, seeds {seeds}; equal FLOPs: {flops:.3g}, equal time: {seconds:.3g} s")
    if args.output:
        write_file(args.output, json.dumps(found, indent=1) + "\n")
    if args.picture:
        from albert_lab.plots.lines import draw_study

        draw_study({name: [*curves.values()] for name, curves in rows.items()}, args.picture)


if __name__ == "__main__":
    cli.run(main)
