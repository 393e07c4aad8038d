"""Make one page of what runs did: curves, results, configurations, data and how they ended.

The page is one file that loads nothing else. RUN is a folder of pretraining or fine-tuning; both
may be on one page.
"""

from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.files import write_output


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    parser.add("runs", "RUN folder, or its metrics.jsonl", "RUN", Path, nargs="+")
    parser.add("--output", "page to write", "HTML", cli.new_file, required=True)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    from albert_lab.report.folder import metrics_path, read_runs
    from albert_lab.report.page import build_page

    found = {metrics_path(run).resolve(): run for run in reversed(args.runs)}
    paths = [run for run in args.runs if found.pop(metrics_path(run).resolve(), None)]
    twice = ["a RUN that was given twice is shown once"] * (len(paths) < len(args.runs))
    write_output(args.output, build_page(read_runs(paths), twice))
    print(args.output)
