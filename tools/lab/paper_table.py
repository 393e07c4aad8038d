"""Print fine-tuned runs as a table in the paper's layout, with its Avg column (Tables 2 to 8).

A row is a folder with one fine-tuned run per task: squad1, squad2, mnli, sst2, race, ... A cell is
the median over the seeds. Avg first averages the F1 and EM of each SQuAD, as in the paper. If the
folder contains the pretrained `run`, the table has its parameters, and with the flags below its
steps, hours, speed and held-out loss. If it contains a `probe.json` of tools/probe.py, the table
has the accuracies of the pretraining tasks.
"""

import math
import statistics
from pathlib import Path

from albert_lab.tables import count_steps, table

from albert_ds.base import cli
from albert_ds.base.cli import Parser, Range
from albert_ds.base.errors import UserError
from albert_ds.base.files import write_report
from albert_ds.base.json_files import build, check, read_json, read_lines
from albert_ds.data.stream_config import list_pair_tasks
from albert_ds.model.config import ModelConfig
from albert_ds.model.shapes import count_params
from albert_ds.tasks.registry import TASKS

TITLES = {"squad1": "SQuAD1.1", "squad2": "SQuAD2.0", "race": "RACE"}
PAPER = ("squad1", "squad2", "glue/mnli", "glue/sst2", "race")
SCORE = Range(ge=-100, le=100)
SQUAD_METRICS = ("f1", "exact")


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/paper_table.py", description=__doc__)
    add = parser.add
    text = "rows of the table: a name, and a folder with one subfolder per task"
    add("--rows", text, "NAME=DIR", cli.path, nargs="+", required=True)
    add("--tasks", "columns (default: the paper's)", nargs="+", choices=TASKS, default=PAPER)
    add("--time", "print steps and hours of pretraining (Table 6)", action="store_true")
    add("--speedup-over", "print samples per second relative to this row (Table 2)", "NAME")
    add("--heldout", "print the last held-out MLM loss of pretraining", action="store_true")
    add("--output", "JSON with the same numbers", type=cli.new_file)
    return parser


def read_cell(folder: Path, task: str) -> dict[str, float] | None:
    """Medians in percent of the metrics in the paper's tables; None without a run."""
    path = folder / task.rpartition("/")[2] / "results.json"
    if not path.is_file():
        return None
    results = read_json(path)
    if results.get("task") != task:
        raise UserError(f"{path}: has the task {results.get('task')}; must be {task}")
    metrics = SQUAD_METRICS if task in ("squad1", "squad2") else TASKS[task].metrics[:1]
    scale = 1 if task in ("squad1", "squad2") else 100  # SQuAD's metrics are in percent already
    cell = {}
    for name in metrics:
        check(results, {"dev": {name: (SCORE, dict)}}, str(path))
        value = results["dev"][name]
        if isinstance(value, dict):
            check(value, {"median": SCORE}, f"{path}: dev.{name}")
            value = value["median"]
        cell[name] = scale * value
    return cell


def read_lead(folder: Path) -> dict[str, str]:
    """Columns before the tasks: parameters (without heads), and accuracies of tools/probe.py."""
    lead = {}
    path = folder / "run" / "config.json"
    if path.is_file():
        config = read_json(path)
        check(config, {"model": dict}, str(path))
        parts = count_params(build(ModelConfig, config["model"], f"{path}: model"))
        number = sum(
            parts[name] for name in ("embeddings", "per_layer", "attention", "ffn", "pooler")
        )
        lead["Parameters"] = f"{number / 1e6:.0f}M" if number > 1e7 else f"{number / 1e6:.2f}M"
    if (folder / "probe.json").is_file():
        path = folder / "probe.json"
        probe = read_json(path)
        for name, title in {"mlm": "MLM", **dict(sorted(list_pair_tasks().items()))}.items():
            key = f"heldout_{name}_accuracy"
            check(probe, {key: Range()}, str(path))
            lead[title] = f"{100 * probe[key]:.1f}"
    return lead


def read_training(run: Path) -> dict[str, float]:
    """Steps, their hours, samples per second and held-out loss, from a run's metrics.jsonl."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file; --time, --speedup-over and --heldout need it")
    records = read_lines(path)
    logged = count_steps(records)
    if not logged:
        raise UserError(f"{path}: no record of a logging interval in it")
    heldout = [r["heldout_mlm_loss"] for r in records if "heldout_mlm_loss" in r]
    return {
        "steps": logged[-1][0]["step"],
        "hours": sum(record["step_seconds"] * steps for record, steps in logged) / 3600,
        "speed": statistics.median(record["samples_per_second"] for record, _ in logged),
        "heldout": heldout[-1] if heldout else math.nan,
    }


def add_training(leads: dict[str, dict], folders: dict[str, Path], args) -> None:
    """Add the columns of --time, --speedup-over and --heldout."""
    if not (args.time or args.speedup_over or args.heldout):
        return
    if args.speedup_over and args.speedup_over not in folders:
        raise UserError(f"--speedup-over {args.speedup_over}: must be one of {', '.join(folders)}")
    trainings = {name: read_training(folder / "run") for name, folder in folders.items()}
    for name, training in trainings.items():
        if args.time:
            leads[name] |= {"Steps": f"{training['steps']:,}", "Hours": f"{training['hours']:.3g}"}
        if args.speedup_over:
            ratio = training["speed"] / trainings[args.speedup_over]["speed"]
            leads[name]["Speedup"] = f"{ratio:.1f}x"
        if args.heldout:
            leads[name]["MLM loss"] = f"{training['heldout']:.3f}"


def average_row(cells: list[dict[str, float] | None]) -> float | None:
    """The paper's Avg over the cells; SQuAD counts as the mean of F1 and EM. None without cells."""
    columns = [statistics.fmean(cell.values()) for cell in cells if cell]
    return statistics.fmean(columns) if columns else None


def as_table(rows: dict[str, list], leads: dict[str, dict], tasks) -> str:
    """A line per row: leading columns, one column per task, and Avg."""
    leading = list(dict.fromkeys(title for lead in leads.values() for title in lead))
    titles = leading + [TITLES.get(task, task.rpartition("/")[2].upper()) for task in tasks]
    lines = []
    for name, cells in rows.items():
        words = [leads[name].get(title, "-") for title in leading]
        words += ["/".join(f"{x:.1f}" for x in cell.values()) if cell else "-" for cell in cells]
        mean = average_row(cells)
        complete = all(cell is not None for cell in cells)
        words.append("-" if mean is None else f"{mean:.1f}" + ("" if complete else "*"))
        lines.append([name, *words])
    note = any(cell is None for cells in rows.values() for cell in cells)
    text = "\n\n\\* over the columns with a run" if note else ""
    return table(["", *titles, "Avg"], lines) + text


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    pairs = [row.partition("=") for row in args.rows]
    for name, equals, folder in pairs:
        if not (name and equals and Path(folder).is_dir()):
            raise UserError(f"--rows {name}{equals}{folder}: must be NAME=DIR with a folder DIR")
    folders = {name: Path(folder) for name, _, folder in pairs}
    rows = {n: [read_cell(folder, task) for task in args.tasks] for n, folder in folders.items()}
    leads = {name: read_lead(folder) for name, folder in folders.items()}
    add_training(leads, folders, args)
    print(as_table(rows, leads, args.tasks))
    if args.output:
        write_report(args.output, rows)


if __name__ == "__main__":
    cli.run(main)
