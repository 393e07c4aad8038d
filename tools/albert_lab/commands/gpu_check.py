"""Check a machine with NVIDIA GPUs: does everything work there, is it exact, and how fast is it?

Nothing is downloaded. The pieces run in the order of their worth, each with a limit of its own,
until the minutes are over; the report names what is left out. What has finished is kept in the
folder, so the same command goes on with what failed or was left out. The report is
REPORT/report.md; the exit code is 1 if a row failed. docs/gpu.md explains the report.
"""

from __future__ import annotations

import time
from pathlib import Path

from albert_ds.base.cli import Parser, Range, log_line
from albert_ds.base.errors import UserError
from albert_ds.data.shards import open_shards


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    add = parser.add
    text = "folder for the report and all raw results; an existing one is continued"
    add("--output", text, "REPORT", Path, required=True)
    add(
        "--piece", "do only these pieces; a wrong name lists them (default: all)", "NAME", nargs="+"
    )
    text = "end after these; with twice or more of 8, each piece may take as much longer"
    add("--minutes", text, "M", Range(gt=0), default=8)
    text = "folder of `albert-ds shards`, to train on (default: this Python's own documentation)"
    add("--data", text, "DATA", Path)
    text = (
        "one tiny model and short rows, in minutes: shows that all commands work, measures nothing"
    )
    add("--quick", text, action="store_true")
    return parser


def main(argv: list[str]) -> int:
    began = time.monotonic()
    args = build_parser().parse_args(argv)
    from albert_lab.gpu_check.check import ROOT, Check, open_folder
    from albert_lab.gpu_check.pieces import PIECES, build_text, run_pieces

    if not (ROOT / "tests").is_dir():
        raise UserError(f"{ROOT}: no clone of the project, whose tests gpu_check runs")
    chosen = args.piece or list(PIECES)
    if unknown := [name for name in chosen if name not in PIECES]:
        raise UserError(f"--piece {unknown[0]}: allowed: {', '.join(PIECES)}")
    if args.data:
        open_shards(args.data, "train")
    import torch

    from albert_ds.checkpoint.run_folder import read_commit
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
    open_folder(args.output, about)
    check = Check(
        folder=args.output.absolute(),
        gpus=gpus,
        quick=args.quick,
        ends=began + 60 * args.minutes,
        stretch=10 if args.quick else max(1, int(args.minutes / 8)),
    )
    check.data = str(args.data.absolute()) if args.data else build_text(check)
    is_good = run_pieces(check, chosen)
    log_line(f"gpu_check: {'PASS' if is_good else 'FAIL'}: {check.folder / 'report.md'}")
    return 0 if is_good else 1
