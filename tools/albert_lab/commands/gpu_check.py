"""Check a machine with NVIDIA GPUs: does everything work there, is it exact, and how fast is it?

Nothing is downloaded. Every measurement is a process of its own with a time limit; what has
finished is kept in the folder, so the same command continues after an interruption and repeats what
failed. The report is REPORT/report.md; the exit code is 1 where a row failed. docs/gpu.md explains
the report.
"""

from __future__ import annotations

from pathlib import Path

from albert_ds.cli import Parser, log_line
from albert_ds.errors import UserError


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    text = "folder for the report and all raw results; an existing one is continued"
    add("--output", type=Path, required=True, metavar="REPORT", help=text)
    text = "do only these pieces; a wrong name lists them (default: all)"
    add("--piece", nargs="+", metavar="NAME", help=text)
    text = "folder of `albert-ds shards`, to train on (default: this Python's own documentation)"
    add("--data", type=Path, metavar="DATA", help=text)
    text = (
        "one tiny model and short rows, in minutes: shows that all commands work, measures nothing"
    )
    add("--quick", action="store_true", help=text)
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    from albert_lab.gpu_check.check import ROOT, Check, open_folder
    from albert_lab.gpu_check.pieces import PIECES, build_text

    if not (ROOT / "tests").is_dir():
        raise UserError(f"{ROOT}: no clone of the project, whose tests gpu_check runs")
    chosen = args.piece or list(PIECES)
    if unknown := [name for name in chosen if name not in PIECES]:
        raise UserError(f"--piece {unknown[0]}: allowed: {', '.join(PIECES)}")
    import torch

    from albert_ds.process.run_folder import read_commit
    from albert_lab.bench_run import count_gpus

    gpus = count_gpus()
    if not gpus:
        raise UserError("no CUDA device is visible to torch; gpu_check needs at least one GPU")
    about = {
        "device": torch.cuda.get_device_name(),
        "gpus": gpus,
        "commit": read_commit(),
        "quick": args.quick,
    }
    folder = args.output.absolute()
    open_folder(folder, about)
    check = Check(folder=folder, gpus=gpus, quick=args.quick)
    check.data = str(args.data.absolute()) if args.data else build_text(check)
    is_good = True
    for name in chosen:
        PIECES[name](check)
        is_good = check.write_report(PIECES)
    log_line(f"gpu_check: {'PASS' if is_good else 'FAIL'}: {folder / 'report.md'}")
    return 0 if is_good else 1
