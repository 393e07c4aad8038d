#!/usr/bin/env python
"""A model of the optimizer step: what it takes on clusters that nobody has at hand.

    fit      constants of a machine from throughput_bench.py's reports, and their error on a whole
             model, a link speed and a number of ranks that the fit has not seen
    predict  steps on 8 to 4,096 GPUs at any link speed, BERT beside ALBERT
    plan     the layout for a model and a cluster: memory, samples/s, hours, bytes
    plot     the picture of what `predict --output` wrote

tools/scaling_model.py fit --input bench.json --hold-out model=albert-large,link=100mbit,ranks=4 \\
    --output constants.json
tools/scaling_model.py predict --models bert-large albert-large --output predictions.json
tools/scaling_model.py plan --model albert-xxlarge --gpus 64 --gpu-memory 80 --link 100 \\
    --steps 125000
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path

from albert_ds.errors import ENDINGS, UserError
from albert_ds.flags import Parser, positive
from albert_ds.model.config import SIZES
from albert_ds.runtime.ending import say
from albert_ds.scaling.cells import KEYS, read_cells
from albert_ds.scaling.fit import check, divide, fit_machine, read_hold_out, summarise
from albert_ds.scaling.hardware import GPUS, LAUNCH_SECONDS, MFU, describe_gpu
from albert_ds.scaling.plan import Plan, find_layouts, find_plans
from albert_ds.scaling.report import (
    batches_as_table,
    checks_as_table,
    plan_as_text,
    predictions_as_table,
)
from albert_ds.scaling.sweep import Recipe, largest_batch, predict_grid

NODES = 64  # where `predict` asks up to what batch a speed-up lasts; twice as many change 1 %
CONSTANTS = Path(__file__).parents[1] / "docs/raw/scaling_constants.json"


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/scaling_model.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    def command(name: str, meaning: str) -> Parser:
        return commands.add_parser(
            name,
            help=meaning,
            description=meaning,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )

    _add_fit(command("fit", "constants of a machine, and their error on what was held back"))
    _add_predict(command("predict", "steps of several models on clusters of a size and a link"))
    _add_plan(command("plan", "the layout to use, and what it needs and takes"))
    plot = command("plot", "speed-up against link speed and against the batch of a GPU")
    plot.add_argument("--input", type=Path, required=True, help="what predict --output wrote")
    plot.add_argument("--output", type=Path, required=True, metavar="PNG", help="picture to write")
    return parser


def _add_fit(parser: Parser) -> None:
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, help="reports of throughput_bench.py")
    add(
        "--hold-out",
        metavar="KEY=VALUE,...",
        help="leave these cells out of the fit and print its error on them, key by key; keys: "
        + ", ".join(KEYS),
    )
    add("--memory", type=Path, help="report of memory_bench.py, whose errors `plan` then states")
    add("--output", type=Path, help="JSON with constants, errors and every cell")


def _add_hardware(parser: Parser) -> None:
    add = parser.add_argument
    add("--hardware", choices=GPUS, default="h100", help="GPU; its rates are inputs, not measured")
    add("--mfu", type=float, default=MFU, help="share of the peak in passes that are large enough")
    add("--gpus-a-node", type=positive, default=8, help="GPUs behind one link")
    add("--batch-size", type=positive, default=4096, help="sequences of one optimizer step")
    add("--sequence-length", type=positive, default=512, help="tokens of a sequence, all real")
    add("--launch-seconds", type=float, default=LAUNCH_SECONDS, help="least time of a layer's pass")


def _add_predict(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=SIZES,
        default=["bert-large", "albert-large", "albert-base", "albert-xlarge", "albert-xxlarge"],
        help="the first is the yardstick",
    )
    add("--gpus", type=positive, nargs="+", default=[8, 32, 128, 512, 1024, 4096], help="counts")
    add(
        "--links",
        type=float,
        nargs="+",
        default=[10, 25, 100, 400, 3200],
        help="Gb/s of a node's network, all its adapters together",
    )
    add("--micro-batch-size", type=positive, default=32, help="sequences of a pass at most")
    add("--zero", type=int, choices=(1, 2, 3), default=1, help="ZeRO stage, in bf16")
    add("--tensor-parallel", type=positive, default=1, help="ranks that a block is cut over")
    add(
        "--overlap",
        type=float,
        nargs="+",
        default=[0.0],
        help="shares of backward behind which complete gradients are reduced; as shipped 0",
    )
    add(
        "--speed-ups",
        type=float,
        nargs="+",
        default=[1.1, 1.7],
        help="of the model that follows the yardstick: up to what batch each link gives them",
    )
    _add_hardware(parser)
    add("--output", type=Path, help="JSON with every prediction")


def _add_plan(parser: Parser) -> None:
    add = parser.add_argument
    add("--model", choices=SIZES, required=True, help="size")
    add("--gpus", type=positive, required=True, help="GPUs in all")
    add("--gpu-memory", type=float, required=True, metavar="GB", help="of one GPU")
    add("--link", type=float, required=True, metavar="GB/S", help="Gb/s of a node's network")
    add("--steps", type=positive, required=True, help="optimizer steps")
    add("--micro-batch-size", type=positive, help="sequences of a pass (default: the best)")
    add("--reserve", type=float, default=0.1, help="share of the memory left to CUDA and NCCL")
    add("--constants", type=Path, default=CONSTANTS, help="what fit --output wrote: the errors")
    _add_hardware(parser)


def run_fit(args) -> None:
    cells = [cell for path in args.input for cell in read_cells(path)]
    held = read_hold_out(args.hold_out) if args.hold_out else []
    rest, groups = divide(cells, held)
    names = ", ".join(path.name for path in args.input)
    machine = fit_machine(rest, name="measured", source=names)
    fitted = check(rest, machine)
    checked = {name: check(group, machine) for name, group in groups.items()}
    print(checks_as_table(machine, fitted, checked))
    if args.output:
        report = {
            "machine": asdict(machine),
            "inputs": [path.name for path in args.input],
            "fitted": summarise(fitted),
            "held_back": {name: summarise(found) for name, found in checked.items()},
            "memory": _read_memory_errors(args.memory),
            "cells": [
                {
                    "cell": found.cell.label,
                    "held_back": found.cell not in rest,
                    "measured_seconds": found.cell.total,
                    "predicted_seconds": found.predicted.total,
                    "error": found.error,
                }
                for found in check(cells, machine)
            ],
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def _read_memory_errors(path: Path | None) -> dict | None:
    if path is None:
        return None
    errors = [abs(cell["error"]) for cell in json.loads(path.read_text())]
    return {"cells": len(errors), "mean": sum(errors) / len(errors), "largest": max(errors)}


def run_predict(args) -> None:
    rows, batches = [], []
    recipe = Recipe(
        gpus_a_node=args.gpus_a_node,
        micro_batch_size=args.micro_batch_size,
        sequence_length=args.sequence_length,
        zero=args.zero,
        tensor_parallel=args.tensor_parallel,
    )
    for overlap in args.overlap:
        machine = describe_gpu(
            args.hardware, mfu=args.mfu, overlap=overlap, launch_seconds=args.launch_seconds
        )
        rows += predict_grid(
            args.models,
            machine,
            recipe,
            gpus=args.gpus,
            links=args.links,
            batch_size=args.batch_size,
        )
        if len(args.models) == 1:
            continue
        pair = (args.models[0], args.models[1])
        for link, wanted in itertools.product(args.links, args.speed_ups):
            size = largest_batch(pair, machine, recipe, link=link, speed_up=wanted, nodes=NODES)
            batches.append(
                {
                    "link_gbits": link,
                    "overlap": overlap,
                    "speed_up": wanted,
                    "sequences_a_gpu": size,
                }
            )
    print(predictions_as_table(rows, machine))
    print(batches_as_table(batches, args.models, NODES))
    if args.output:
        report = {"predicted": True, "machine": asdict(machine), "rows": rows, "batches": batches}
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def run_plan(args) -> None:
    if not 0 <= args.reserve < 1:
        raise UserError(f"--reserve {args.reserve}: must be at least 0 and below 1")
    for flag, value in (("--gpu-memory", args.gpu_memory), ("--link", args.link)):
        if not value > 0:
            raise UserError(f"{flag} {value}: must be above 0")
    if not args.constants.is_file():
        raise UserError(f"--constants {args.constants}: no such file; `fit --output` writes it")
    layouts = find_layouts(
        args.model,
        SIZES[args.model],
        ranks=args.gpus,
        ranks_a_node=args.gpus_a_node,
        batch_size=args.batch_size,
        sequence_length=args.sequence_length,
        micro_batch_sizes=(args.micro_batch_size,) if args.micro_batch_size else None,
    )
    machine = describe_gpu(args.hardware, mfu=args.mfu, launch_seconds=args.launch_seconds)
    limit = args.gpu_memory * 1e9 * (1 - args.reserve)
    plans: list[Plan] = find_plans(layouts, machine, link=args.link * 1e9, memory_limit=limit)
    errors = json.loads(args.constants.read_text())
    print(plan_as_text(plans, steps=args.steps, limit=limit, machine=machine, errors=errors))


def run_plot(args) -> None:
    from albert_ds.pictures.scaling import draw_scaling
    from albert_ds.pictures.style import read_report

    draw_scaling(read_report(args.input, "rows")["rows"], args.output)
    print(args.output)


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    run = {"fit": run_fit, "predict": run_predict, "plan": run_plan, "plot": run_plot}
    run[args.command](args)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
