"""Fine-tuned runs as a table in the paper's layout, with its Avg column (Tables 2 to 8).

A row is a folder with a fine-tuned run a task: squad1, squad2, mnli, sst2, race, ... Over several
seeds a cell is the median, and --spread gives mean and standard deviation instead. In Avg the F1
and EM of each SQuAD are averaged first, as the paper has it. Where the folder has the pretrained
`run`, its parameters get a column, its steps and hours with --time, its speed with --speedup-over,
its last held-out MLM loss with --heldout; the intrinsic tasks get theirs with a `probe.json` of
tools/probe.py.

python tools/paper_table.py --rows shared=tuned/shared not-shared=tuned/none
"""

import json
import math
import statistics
import sys
from pathlib import Path

from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser
from albert_ds.interop import read_json
from albert_ds.runtime.ending import say
from albert_ds.tasks.table import TASKS

TITLES = {"squad1": "SQuAD1.1", "squad2": "SQuAD2.0", "race": "RACE"}
PAPER = ("squad1", "squad2", "glue/mnli", "glue/sst2", "race")
SQUAD_METRICS = ("f1", "exact")


def build_parser() -> Parser:
    parser = Parser(prog="tools/paper_table.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--rows",
        nargs="+",
        required=True,
        metavar="NAME=DIR",
        help="rows of the table: a name and a folder with a subfolder a task",
    )
    add("--tasks", nargs="+", choices=TASKS, default=PAPER, help="columns (default: the paper's)")
    add("--time", action="store_true", help="steps and hours of pretraining (Table 6)")
    add("--speedup-over", metavar="NAME", help="samples a second over those of a row (Table 2)")
    add("--heldout", action="store_true", help="last held-out MLM loss of pretraining")
    add("--spread", action="store_true", help="mean and standard deviation over the seeds")
    add("--output", type=Path, help="JSON with the same numbers")
    return parser


def read_cell(folder: Path, task: str) -> dict[str, dict[str, float]] | None:
    """Median, mean and std in percent of the metrics that the paper prints; None without a run."""
    path = folder / task.rpartition("/")[2] / "results.json"
    if not path.is_file():
        return None
    found = read_json(path)
    if found.get("task") != task:
        raise UserError(f"{path}: is of {found.get('task')}, must be of {task}")
    metrics = SQUAD_METRICS if task in ("squad1", "squad2") else TASKS[task].metrics[:1]
    scale = 1 if task in ("squad1", "squad2") else 100  # SQuAD's are percent by definition
    cell = {}
    for name in metrics:
        value = found["dev"][name]
        over_seeds = (
            value if isinstance(value, dict) else {"median": value, "mean": value, "std": 0}
        )
        cell[name] = {key: scale * over_seeds[key] for key in ("median", "mean", "std")}
    return cell


def read_lead(folder: Path) -> dict[str, str]:
    """Columns before the tasks': parameters (without heads), and accuracies of tools/probe.py."""
    from albert_ds.model.arithmetic import count_params
    from albert_ds.model.config import ModelConfig

    lead = {}
    if (folder / "run" / "config.json").is_file():
        parts = count_params(ModelConfig(**read_json(folder / "run" / "config.json")["model"]))
        number = sum(parts[name] for name in ("embeddings", "attention", "ffn", "pooler"))
        lead["Parameters"] = f"{number / 1e6:.0f}M" if number > 1e7 else f"{number / 1e6:.2f}M"
    if (folder / "probe.json").is_file():
        found = read_json(folder / "probe.json")
        for name in ("mlm", "nsp", "sop"):
            lead[name.upper()] = f"{100 * found[f'heldout_{name}_accuracy']:.1f}"
    return lead


def read_training(run: Path) -> dict[str, float]:
    """Steps, hours in those steps, samples a second and held-out loss, from a run's metrics."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file, so no --time, --speedup-over and --heldout")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    logged = [record for record in records if "step_seconds" in record]
    starts = [0, *(record["step"] for record in logged)]
    seconds = [r["step_seconds"] * (r["step"] - s) for r, s in zip(logged, starts, strict=False)]
    speed = statistics.median(record["samples_per_second"] for record in logged)
    heldout = [r["heldout_mlm_loss"] for r in records if "heldout_mlm_loss" in r]
    return {
        "steps": logged[-1]["step"],
        "hours": sum(seconds) / 3600,
        "speed": speed,
        "heldout": heldout[-1] if heldout else math.nan,
    }


def add_training(leads: dict[str, dict], folders: dict[str, Path], args) -> None:
    """The columns that --time, --speedup-over and --heldout ask for."""
    if not (args.time or args.speedup_over or args.heldout):
        return
    if args.speedup_over and args.speedup_over not in folders:
        raise UserError(f"--speedup-over {args.speedup_over}: must be one of {', '.join(folders)}")
    found = {name: read_training(folder / "run") for name, folder in folders.items()}
    for name, training in found.items():
        if args.time:
            leads[name] |= {"Steps": f"{training['steps']:,}", "Hours": f"{training['hours']:.3g}"}
        if args.speedup_over:
            ratio = training["speed"] / found[args.speedup_over]["speed"]
            leads[name]["Speedup"] = f"{ratio:.1f}x"
        if args.heldout:
            leads[name]["MLM loss"] = f"{training['heldout']:.3f}"


def average_row(cells: list[dict | None], statistic: str) -> float | None:
    """The paper's Avg: a column each, of SQuAD the mean of its two numbers; None without cells."""
    columns = [
        sum(numbers[statistic] for numbers in cell.values()) / len(cell) for cell in cells if cell
    ]
    return sum(columns) / len(columns) if columns else None


def as_table(rows: dict[str, list], leads: dict[str, dict], tasks, *, spread: bool) -> str:
    """Markdown: a line a row; a column for what leads, one a task, and Avg."""
    leading = list(dict.fromkeys(title for lead in leads.values() for title in lead))
    titles = leading + [TITLES.get(task, task.rpartition("/")[2].upper()) for task in tasks]
    lines = [f"| | {' | '.join(titles)} | Avg |", "| --- |" + " --- |" * (len(titles) + 1)]
    for name, cells in rows.items():
        words = [leads[name].get(title, "-") for title in leading]
        words += [_write_cell(cell, spread=spread) for cell in cells]
        mean = average_row(cells, "mean" if spread else "median")
        complete = all(cell is not None for cell in cells)
        words.append("-" if mean is None else f"{mean:.1f}" + ("" if complete else "*"))
        lines.append(f"| {name} | {' | '.join(words)} |")
    if any(cell is None for cells in rows.values() for cell in cells):
        lines.append("\n\\* over the columns that are there")
    return "\n".join(lines)


def _write_cell(cell: dict | None, *, spread: bool) -> str:
    if cell is None:
        return "-"
    if spread:
        return " / ".join(f"{x['mean']:.1f} +- {x['std']:.1f}" for x in cell.values())
    return "/".join(f"{x['median']:.1f}" for x in cell.values())


def main(argv: list[str] | None = None) -> int:
    try:
        args = build_parser().parse_args(argv)
        pairs = [row.partition("=") for row in args.rows]
        for name, equals, folder in pairs:
            if not (name and equals and Path(folder).is_dir()):
                raise UserError(f"--rows {name}{equals}{folder}: must be NAME=DIR, a folder")
        rows = {
            name: [read_cell(Path(folder), task) for task in args.tasks]
            for name, _, folder in pairs
        }
        leads = {name: read_lead(Path(folder)) for name, _, folder in pairs}
        add_training(leads, {name: Path(folder) for name, _, folder in pairs}, args)
        print(as_table(rows, leads, args.tasks, spread=args.spread))
        if args.output:
            args.output.write_text(json.dumps(rows, indent=1) + "\n")
    except ENDINGS as ending:
        say(str(ending))
        return ending.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
