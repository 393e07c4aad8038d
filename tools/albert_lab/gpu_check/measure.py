"""One process of measurements: `python -m albert_lab.gpu_check.measure PIECE --output FILE`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.cli import Range
from albert_lab.gpu_check.eight_bits import measure_eight_bits
from albert_lab.gpu_check.rates import describe_machine, measure_shapes
from albert_lab.gpu_check.records import Records

GRAPHS = ("graph_equal", "graph_speed", "graph_parts")
PIECES = ("machine", "smoke", "speed", "host", "rates", "fp8", "fp8steps", *GRAPHS)


def build_parser() -> cli.Parser:
    parser = cli.Parser(prog="albert_lab.gpu_check.measure", description=__doc__)
    add = parser.add
    add("piece", "what to measure", choices=PIECES)
    text = "from the start of the process; what cannot begin in them is left out"
    add("--seconds", text, "S", Range(gt=0), required=True)
    add("--data", "folder of shards, for `speed` and `host`", default="")
    add("--eager-kernels", "`host`: with every kernel loaded at the start", action="store_true")
    add("--output", "JSON with every figure", type=Path, required=True)
    add("--quick", "tiny models and tensors; figures mean nothing", action="store_true")
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    records = Records(args.output, args.seconds)
    if args.piece == "machine":
        records.measure("machine", partial(describe_machine, args.quick))
    elif args.piece == "rates":
        measure_shapes(records, args.quick)
    elif args.piece == "fp8":
        measure_eight_bits(records, args.quick)
    else:  # DeepSpeed takes seconds to import
        from albert_lab.gpu_check.host import measure_host
        from albert_lab.gpu_check.steps import measure_speeds, smoke

        if args.piece == "smoke":
            smoke(records, args.quick)
        elif args.piece == "fp8steps":
            from albert_lab.gpu_check.eight_bit_steps import measure_steps

            measure_steps(records, args.quick)
        elif args.piece in GRAPHS:
            from albert_lab.gpu_check import graph_steps

            of = (
                graph_steps.measure_equality,
                graph_steps.measure_graphs,
                graph_steps.capture_parts,
            )
            dict(zip(GRAPHS, of, strict=True))[args.piece](records, args.quick, args.data)
        elif args.piece == "host":
            measure_host(records, args.quick, args.data, eager=args.eager_kernels)
        else:
            measure_speeds(records, args.quick, args.data)
    sys.stdout.flush()
    failed = any(record["ok"] is False for record in records.all)
    os._exit(int(failed))  # NCCL's threads need no farewell


if __name__ == "__main__":
    cli.run(main)
