"""Compare what layers share, at equal FLOPs and at equal time (slurm/ablations/sharing.sh).

A row is a folder with a run per seed (seed-1, seed-2, ...). Held-out losses are those of the last
step, of the point with as many FLOPs as the row with the fewest has spent, and of the point with as
much time as the fastest row has taken; between evaluations they are interpolated. Rows with equal
parameters stand together. A run that began with another run's weights has spent what that one had;
its speed and its costs of a token are its own. A cell is the mean over the seeds, with its 95 %
interval (Student's t).
A seed fixes the data, the masks and what is held out, so --against compares seed by seed, in a
table of its own: the interval of a mean difference is much narrower than those of the two means.
"""

import statistics
import sys
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np
from albert_lab.report.seeds import mean_interval
from albert_lab.scaling.collectives import GRADIENT_BYTES
from albert_lab.tables import table

from albert_ds.base import cli
from albert_ds.base.cli import Parser, Range, non_negative, positive
from albert_ds.base.errors import UserError
from albert_ds.base.files import write_report
from albert_ds.base.json_files import build, check, read_json, read_lines
from albert_ds.model.config import ModelConfig
from albert_ds.model.depth import draw_depth, read_depths
from albert_ds.model.shapes import count_params

CONFIG = {"model": dict, "steps": positive, "seed": non_negative}
LOGGED = dict.fromkeys(("step", "flops", "step_seconds", "tokens_per_second"), Range(gt=0))
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
    add = parser.add
    text = "rows of the table: a name, and a folder with one run per seed"
    add("--rows", text, "NAME=DIR", cli.path, nargs="+", required=True)
    add("--against", "row that the others are compared with, seed by seed (default: none)", "NAME")
    add("--output", "JSON with the same numbers", "FILE", cli.new_file)
    return parser


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A run's held-out MLM losses, and what was spent up to each evaluation."""

    losses: list[float]
    steps: list[int]
    flops: list[float]
    seconds: list[float]
    reached: dict[str, float]  # fields of a row: costs, speed, and what probe.py measured

    def then(self, other: "Curve") -> "Curve":
        """Both, where the other run began with this one's weights."""
        return Curve(
            losses=self.losses + other.losses,
            steps=self.steps + [self.steps[-1] + x for x in other.steps],
            flops=self.flops + [self.flops[-1] + x for x in other.flops],
            seconds=self.seconds + [self.seconds[-1] + x for x in other.seconds],
            reached=other.reached,
        )


def read_curve(run: Path) -> Curve:
    """The run's, after that of the run whose weights it began with, if there is one.

    Raises UserError, naming the file, where a run has no held-out loss or no timed steps.
    """
    config = read_json(run / "config.json")
    check(config, CONFIG, str(run / "config.json"))
    curve = read_own_curve(run, config)
    if not config.get("init_from"):
        return curve
    start = Path(config["init_from"])
    if not start.is_dir():
        print(f"{run}: {start} is gone; what its weights cost is not counted", file=sys.stderr)
    trained = (start / "metrics.jsonl").is_file()
    return read_curve(start).then(curve) if trained else curve


def read_own_curve(run: Path, config: dict) -> Curve:
    """Of the run's own steps. Raises what `read_curve` raises."""
    path = run / "metrics.jsonl"
    model = build(ModelConfig, config["model"], f"{run / 'config.json'}: model")
    records = read_lines(path) if path.is_file() else []
    logged = [record for record in records if "flops" in record]
    held = [record for record in records if record.get("heldout_mlm_loss") is not None]
    if not logged or not held:
        raise UserError(f"{path}: has no logged steps or no held-out loss; the run is not trained")
    for record in logged:
        check({key: record.get(key) for key in LOGGED}, LOGGED, str(path))
    ends = [0, *(record["step"] for record in logged)]
    steps = np.diff(ends)
    at = [record["step"] for record in held]

    def total(value) -> np.ndarray:
        """The sum of a value of a step, up to the end of each interval."""
        return np.concatenate([[0], np.cumsum(steps * [value(record) for record in logged])])

    flops, seconds = (total(itemgetter(key)) for key in ("flops", "step_seconds"))
    tokens = total(lambda record: record["tokens_per_second"] * record["step_seconds"])
    depths = read_depths(model, config.get("depth_schedule"), config["steps"])
    layers = [draw_depth(depths.at(step), config["seed"], step) for step in range(ends[-1])]
    blimp, probed = (
        read_json(file) if file.is_file() else {}
        for file in (run / "blimp.json", run / "probe.json")
    )
    parameters = sum(count_params(model).values())
    reached = {
        "parameters": parameters,
        "flops_a_token": float(flops[-1] / tokens[-1]),
        "gradient_bytes": GRADIENT_BYTES * parameters,
        "tokens_a_second": float(tokens[-1] / seconds[-1]),  # without evaluation and checkpoints
        "layers_a_step": statistics.fmean(layers),
        "loss": held[-1]["heldout_mlm_loss"],
        "bits": probed.get("heldout_bits_per_byte"),
        "mlm": probed.get("heldout_mlm_accuracy"),
        # probe.py trains a head where the run has none.
        "sop": probed.get("heldout_sop_accuracy", held[-1].get("heldout_sop_accuracy")),
        "nsp": probed.get("heldout_nsp_accuracy"),
        "blimp": blimp.get("accuracy"),
    }
    return Curve(
        losses=[record["heldout_mlm_loss"] for record in held],
        steps=at,
        flops=np.interp(at, ends, flops).tolist(),
        seconds=np.interp(at, ends, seconds).tolist(),
        reached={name: value for name, value in reached.items() if value is not None},
    )


def summarise(curves: list[Curve], flops: float, seconds: float) -> dict[str, list[float]]:
    """The fields of a row, a value a seed; `flops` and `seconds` are the common budgets."""
    fields: dict[str, list[float]] = {}
    for curve in curves:
        at = {
            "loss_at_flops": float(np.interp(flops, curve.flops, curve.losses)),
            "loss_at_time": float(np.interp(seconds, curve.seconds, curve.losses)),
        }
        for name, value in (curve.reached | at).items():
            fields.setdefault(name, []).append(value)
    return fields


def compare(curves: dict[str, Curve], reference: dict[str, Curve]) -> dict[str, list[float]]:
    """Each field of COMPARED minus the reference's, for the seeds in which both have it."""
    differences: dict[str, list[float]] = {}
    for field in COMPARED.values():
        for seed in sorted(curves.keys() & reference.keys()):
            own, other = curves[seed].reached.get(field), reference[seed].reached.get(field)
            if own is not None and other is not None:
                differences.setdefault(f"{field}_difference", []).append(own - other)
    return differences


def as_cell(field: str, values: list[float] | None) -> str:
    """Mean and half of its 95 % interval; the mean alone of one seed or of equal values."""
    if not values:
        return "-"
    decimals, unit = DECIMALS.get(field, 3), UNITS.get(field, 1)
    mean = f"{statistics.mean(values) / unit:,.{decimals}f}"
    if len({*values}) == 1:
        return mean
    return f"{mean} +- {mean_interval(values)[1] / unit:.{decimals}f}"


def draw(rows: dict[str, dict[str, list[float]]], columns: dict[str, str]) -> str:
    """The rows by parameters, and those of the columns that a row has."""
    shown = {title: f for title, f in columns.items() if any(f in x for x in rows.values())}
    ordered = sorted(rows, key=lambda name: rows[name]["parameters"][0])
    lines = [[n, *(as_cell(f, rows[n].get(f)) for f in shown.values())] for n in ordered]
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
    flops, seconds = (min(getattr(c, name)[-1] for c in every) for name in ("flops", "seconds"))
    summaries = {
        name: summarise([*curves.values()], flops, seconds) for name, curves in rows.items()
    }
    for name, curves in rows.items():
        if args.against and name != args.against:
            summaries[name] |= compare(curves, rows[args.against])
    print(draw(summaries, COLUMNS))
    if args.against:
        compared = {title: f"{field}_difference" for title, field in COMPARED.items()}
        print(f"\nMinus {args.against}, seed by seed:\n")
        print(draw({name: x for name, x in summaries.items() if name != args.against}, compared))
    steps = sorted({curve.steps[-1] for curve in every})
    seeds = sorted({len(curves) for curves in rows.values()})
    print(f"\nSteps {steps}, seeds {seeds}; equal FLOPs: {flops:.3g}, equal time: {seconds:.3g} s")
    if args.output:
        write_report(args.output, summaries)


if __name__ == "__main__":
    cli.run(main)
