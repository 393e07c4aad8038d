"""Make one page of what runs did: curves, results, configurations, data and how they ended.

The page is one file that loads nothing else. RUN is a folder of pretraining or fine-tuning; both
may be on one page.
"""

from pathlib import Path

from albert_ds import cli
from albert_ds.errors import UserError
from albert_ds.files import refuse_input, write_file


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    text = "RUN folder, or its metrics.jsonl"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=text)
    text = "page to write"
    parser.add_argument("--output", type=cli.new_file, required=True, metavar="HTML", help=text)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    from albert_lab.report.chart import LETTERS
    from albert_lab.report.folder import read_folder
    from albert_lab.report.page import build_page
    from albert_lab.runs import metrics_path, name_runs

    found = {metrics_path(run).resolve(): run for run in reversed(args.runs)}
    paths = [run for run in args.runs if found.pop(metrics_path(run).resolve(), None)]
    if len(paths) > len(LETTERS):
        raise UserError(f"RUN: {len(paths)} runs; allowed: at most {len(LETTERS)} on one page")
    notes = []
    if len(paths) < len(args.runs):
        notes.append("a RUN that was given twice is shown once")
    names = name_runs(paths)
    runs = [
        read_folder(path, number, name)
        for number, (path, name) in enumerate(zip(paths, names, strict=True))
    ]
    refuse_input(args.output, [run.path / "metrics.jsonl" for run in runs])
    write_file(args.output, build_page(runs, notes))
    print(args.output)
