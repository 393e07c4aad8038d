#!/usr/bin/env python
"""What the reports of throughput_bench say about sharing: which part of a speed-up is which.

Two models are taken apart in steps, each measured in the same rounds: their FLOPs; forward and
backward alone; with all else but communication (update, data); the whole step. `--against config`
compares instead what else was tried with the first configuration, model by model.

python tools/bench_tables.py REPORT [REPORT ...]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from albert_ds.errors import ENDINGS
from albert_ds.flags import Parser
from albert_ds.measure.table import LAYOUT, middle
from albert_ds.runtime.ending import say

MODELS = """\
| model / yardstick | nodes x ranks | samples x tokens a pass | link | MB sent a rank | waits, s \
| of its step | yardstick's share of the link: reducing, gathering | by FLOPs \
| forward, backward | with the update | speed-up |
| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""
CONFIGS = """\
| configuration | model | nodes x ranks, tensor parallel | passes a step | calls a step \
| MB sent a rank | a step's time / the first's | its waiting / the first's | peak GB |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/bench_tables.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("reports", nargs="+", type=Path, help="JSON of tools/throughput_bench.py")
    parser.add_argument("--against", choices=("model", "config"), default="model", help="(model)")
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    header, compare = {
        "model": (MODELS, compare_models),
        "config": (CONFIGS, compare_configs),
    }[args.against]
    print(header)
    for path in args.reports:  # what was not measured side by side is not compared
        print("\n".join(compare(json.loads(path.read_text())["cells"])))


def groups(cells: list[dict], names: tuple[str, ...]) -> list[list[dict]]:
    """Cells that agree in these fields, in the order of the report."""
    found: dict[tuple, list[dict]] = {}
    for cell in cells:
        found.setdefault(tuple(cell[name] for name in names), []).append(cell)
    return list(found.values())


def compare_models(cells: list[dict]) -> list[str]:
    """Every model beside the first of its layout and link."""
    lines = []
    for first, *others in groups(cells, (*LAYOUT, "link", "deepspeed_config", "accumulation")):
        for own in others:
            flops = flops_a_sample(first) / flops_a_sample(own)
            columns = [
                f"{own['model']} / {first['model']}",
                f"{own['nodes']} x {own['ranks'] // own['nodes']}",
                f"{own['micro_batch_size']} x {own['sequence_length']}",
                own["link"] or "no limit",
                pair(own, first, lambda c: lambda r: r["wire_bytes_a_step"] / 1e6, "{:.0f}"),
                pair(own, first, lambda c: lambda r: r["communication_seconds"], "{:.3g}"),
                pair(own, first, lambda c: waiting, "{:.0%}"),
                ", ".join(kind_shares(first)) or "-",
                f"{flops:.2f}",
                f"{statistics.median(ratios(first, own, passes)):.2f}",
                f"{statistics.median(ratios(first, own, without_waiting)):.2f}",
                three(ratios(first, own, whole)),
            ]
            lines.append(f"| {' | '.join(columns)} |")
    return lines


def compare_configs(cells: list[dict]) -> list[str]:
    """Every configuration beside the first of its layout, model and link."""
    lines = []
    for group in groups(cells, ("model", "nodes", "ranks", "micro_batch_size", "link")):
        first = group[0]
        for own in group:
            columns = [
                Path(own["deepspeed_config"]).stem + f", ZeRO-{own['zero']}",
                own["model"],
                f"{own['nodes']} x {own['ranks'] // own['nodes']}, {own['tensor_parallel']}",
                str(own["accumulation"]),
                f"{middle(own['rounds'], lambda r: sum(r['calls_a_step'].values())):.0f}",
                f"{middle(own['rounds'], lambda r: r['wire_bytes_a_step']) / 1e6:.1f}",
                three(ratios(own, first, whole)),
                three(ratios(own, first, lambda r: r["communication_seconds"])),
                f"{own['rounds'][0]['peak_memory'] / 1e9:.2f}",
            ]
            lines.append(f"| {' | '.join(columns)} |")
    return lines


def passes(turn: dict) -> float:
    return turn["forward_seconds"] + turn["backward_seconds"]


def without_waiting(turn: dict) -> float:
    return turn["seconds_a_step"] - turn["communication_seconds"]


def whole(turn: dict) -> float:
    return turn["seconds_a_step"]


def waiting(turn: dict) -> float:
    """The part of the step that waits for collectives."""
    return turn["communication_seconds"] / turn["seconds_a_step"]


def kind_shares(cell: dict) -> list[str]:
    """Of the link's rate, what a rank sent while gradients were reduced and weights gathered."""
    if not cell["link"]:
        return []
    kinds = [kind for kind in ("gradients", "weights") if kind in cell["rounds"][0]["kinds"]]
    return [f"{middle(cell['rounds'], kind_share(cell, kind)):.0%}" for kind in kinds]


def kind_share(cell: dict, kind: str) -> Callable[[dict], float]:
    def share(turn: dict) -> float:
        found = turn["kinds"][kind]
        return 8 * found["wire_bytes"] / found["seconds"] / cell["link_bits_per_second"]

    return share


def flops_a_sample(cell: dict) -> float:
    return cell["flops_a_step"] / cell["micro_batch_size"] / cell["accumulation"]


def ratios(above: dict, below: dict, seconds: Callable[[dict], float]) -> list[float]:
    """Round by round."""
    pairs = zip(above["rounds"], below["rounds"], strict=True)
    return [seconds(one) / seconds(other) for one, other in pairs]


def pair(own: dict, first: dict, value: Callable, form: str) -> str:
    """The model's median, and the yardstick's."""
    return " / ".join(form.format(middle(cell["rounds"], value(cell))) for cell in (own, first))


def three(values: list[float]) -> str:
    """Minimum, median and maximum; a single one as it is."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{min(values):.2f} - {statistics.median(values):.2f} - {max(values):.2f}"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
