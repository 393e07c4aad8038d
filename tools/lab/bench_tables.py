#!/usr/bin/env python
"""Compare the cells of throughput_bench.py's reports: where does a speed-up come from?

Two models are compared in steps, each within the same rounds: their FLOPs; forward and backward
only; everything but communication (also update and data); the whole step. --against config
compares DeepSpeed configurations with the first one instead, model by model.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

from albert_lab.scaling.collectives import GRADIENTS, WEIGHTS
from albert_lab.tables import group_by, read_report, spread, table
from albert_lab.throughput_tables import LAYOUT, middle

from albert_ds import cli
from albert_ds.cli import Parser

MODELS = ("model / baseline", "nodes x ranks", "sequences x tokens per micro-batch", "link")
MODELS += ("MB sent per rank", "exposed s", "exposed share of the step")
MODELS += ("baseline's share of the link: reducing, gathering", "by FLOPs", "forward, backward")
MODELS += ("with the update", "speed-up")
CONFIGS = ("configuration", "model", "nodes x ranks, tensor parallel", "micro-batches per step")
CONFIGS += ("calls per step", "MB sent per rank", "step / the first's", "exposed / the first's")
CONFIGS += ("peak GB",)


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/bench_tables.py", description=__doc__)
    add = parser.add_argument
    add("reports", nargs="+", type=Path, help="JSON of tools/throughput_bench.py")
    text = "what is compared: models with the baseline, or configurations with the first"
    add("--against", choices=("model", "config"), default="model", help=text)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    header, compare = (
        (MODELS, compare_models) if args.against == "model" else (CONFIGS, compare_configs)
    )
    # Cells of different reports were not measured side by side: they are not compared.
    reports = [read_report(path)["cells"] for path in args.reports]
    print(table(header, [row for cells in reports for row in compare(cells)]))


def compare_models(cells: list[dict]) -> list[list[str]]:
    """Every model beside the first of its layout and link."""
    return [
        _compare_model(own, first)
        for first, *others in group_by(cells, (*LAYOUT, "link", "deepspeed_config", "accumulation"))
        for own in others
    ]


def _compare_model(own: dict, first: dict) -> list[str]:
    def pair(value: Callable[[dict], float], form: str) -> str:
        """The model's median, and the baseline's."""
        return " / ".join(form.format(middle(cell["rounds"], value)) for cell in (own, first))

    return [
        f"{own['model']} / {first['model']}",
        f"{own['nodes']} x {own['ranks'] // own['nodes']}",
        f"{own['micro_batch_size']} x {own['sequence_length']}",
        own["link"] or "no limit",
        pair(lambda r: r["wire_bytes_a_step"] / 1e6, "{:.0f}"),
        pair(exposed, "{:.3g}"),
        pair(lambda r: exposed(r) / whole(r), "{:.0%}"),
        ", ".join(kind_shares(first)) or "-",
        f"{flops_per_sample(first) / flops_per_sample(own):.2f}",
        f"{statistics.median(ratios(first, own, passes)):.2f}",
        f"{statistics.median(ratios(first, own, lambda r: whole(r) - exposed(r))):.2f}",
        spread(ratios(first, own, whole), ".2f"),
    ]


def compare_configs(cells: list[dict]) -> list[list[str]]:
    """Every configuration beside the first of its layout, model and link."""
    return [
        [
            Path(own["deepspeed_config"]).stem + f", ZeRO-{own['zero']}",
            own["model"],
            f"{own['nodes']} x {own['ranks'] // own['nodes']}, {own['tensor_parallel']}",
            str(own["accumulation"]),
            f"{middle(own['rounds'], lambda r: sum(r['calls_a_step'].values())):.0f}",
            f"{middle(own['rounds'], lambda r: r['wire_bytes_a_step']) / 1e6:.1f}",
            spread(ratios(own, group[0], whole), ".2f"),
            spread(ratios(own, group[0], exposed), ".2f"),
            f"{own['rounds'][0]['peak_memory'] / 1e9:.2f}",
        ]
        for group in group_by(cells, ("model", "nodes", "ranks", "micro_batch_size", "link"))
        for own in group
    ]


def passes(turn: dict) -> float:
    return turn["forward_seconds"] + turn["backward_seconds"]


def exposed(turn: dict) -> float:
    return turn["communication_seconds"]


def whole(turn: dict) -> float:
    return turn["seconds_a_step"]


def kind_shares(cell: dict) -> list[str]:
    """A rank's rate while gradients are reduced and weights gathered, as shares of the link's."""
    if not cell["link"]:
        return []

    def share(kind: str) -> Callable[[dict], float]:
        scale = 8 / cell["link_bits_per_second"]
        return lambda r: scale * r["kinds"][kind]["wire_bytes"] / r["kinds"][kind]["seconds"]

    kinds = [kind for kind in (GRADIENTS, WEIGHTS) if kind in cell["rounds"][0]["kinds"]]
    return [f"{middle(cell['rounds'], share(kind)):.0%}" for kind in kinds]


def flops_per_sample(cell: dict) -> float:
    return cell["flops_a_step"] / cell["micro_batch_size"] / cell["accumulation"]


def ratios(above: dict, below: dict, seconds: Callable[[dict], float]) -> list[float]:
    """Round by round."""
    pairs = zip(above["rounds"], below["rounds"], strict=True)
    return [seconds(one) / seconds(other) for one, other in pairs]


if __name__ == "__main__":
    cli.run(main)
