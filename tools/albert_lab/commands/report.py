"""Make one page of what runs did: curves, results, configurations, data and how they ended.

The page is one file that loads nothing else. RUN is a folder of pretraining or fine-tuning; both
may be on one page.
"""

from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.files import check_folder, new_folder, write_output


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    parser.add("runs", "RUN folder, or its metrics.jsonl", "RUN", Path, nargs="+")
    parser.add("--output", "page to write", "HTML", cli.new_file, required=True)
    text = "folder for the page's tables as CSV, without others (default: none)"
    parser.add("--csv", text, "DIR", Path)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    from albert_lab.report.folder import metrics_path, read_runs

    if args.csv is not None:
        check_folder(args.csv, args.runs, names=["*.csv"])
    from albert_lab.report.page import build_page
    from albert_lab.report.table import write_csv

    runs = {metrics_path(run).resolve(): run for run in reversed(args.runs)}
    paths = [run for run in args.runs if runs.pop(metrics_path(run).resolve(), None)]
    twice = ["a RUN that was given twice is shown once"] * (len(paths) < len(args.runs))
    html, tables = build_page(read_runs(paths), twice)
    write_output(args.output, html)
    print(args.output)
    if args.csv is not None:
        with new_folder(args.csv) as folder:
            for name, table in tables.items():
                write_csv(table, folder / f"{name}.csv")
        print(args.csv)
