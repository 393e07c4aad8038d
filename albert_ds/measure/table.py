"""A throughput report for a person: how fast, and where the time goes."""

import statistics
from collections.abc import Callable

from albert_ds.measure.rounds import SECONDS

# "Speedup" of the paper's Table 2, against BERT-large.
PAPER = {
    "bert-base": 4.7,
    "bert-large": 1.0,
    "albert-base": 5.6,
    "albert-large": 1.7,
    "albert-xlarge": 0.6,
    "albert-xxlarge": 0.3,
}
LAYOUT = ("ranks", "nodes", "tensor_parallel", "micro_batch_size")
FORMULA = (
    "FLOP a step: 6 x (tokens x (E H + L (4 H^2 + 2 H F)) + sum of squared lengths x 2 L H + "
    "masked x (H E + E V)), real tokens, nothing twice that checkpointing computes again, the last "
    "layer for every token, though only what is read of it is computed"
)


def as_tables(report: dict) -> str:
    """One pair of tables a layout; its first model is the yardstick of the speed-ups."""
    layouts: dict[tuple, list[dict]] = {}
    for cell in report["cells"]:
        layouts.setdefault(tuple(cell[name] for name in LAYOUT), []).append(cell)
    parts = []
    for layout, cells in layouts.items():
        ranks, nodes, tensor_parallel, micro_batch = layout
        first = cells[0]
        parts += [
            f"{report['device']}; {ranks} ranks on {nodes} nodes, tensor parallel "
            f"{tensor_parallel}, {micro_batch} samples of {first['sequence_length']} tokens a "
            f"pass, {first['accumulation']} passes a step; median (min .. max) of "
            f"{len(first['rounds'])} rounds",
            "",
            *_speeds(cells, report["peak_flops"]),
            "",
            *_splits(cells),
            "",
        ]
    memory = (
        "tensors on the device"
        if report["on_gpu"]
        else "peak resident set of the process, Python and libraries with it"
    )
    return "\n".join([*parts, f"{FORMULA}. Peak memory of a rank: {memory}."])


def _speeds(cells: list[dict], peak: float | None) -> list[str]:
    lines = [
        "| model | parameters | ZeRO | link | samples/s | tokens/s | TFLOP/s a rank | MFU | "
        "speed-up | paper | peak GB |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in cells:
        rounds = cell["rounds"]
        tflops = [r["flops_a_second"] / cell["ranks"] / 1e12 for r in rounds]
        memory = rounds[-1]["peak_memory"]
        columns = [
            cell["model"],
            f"{cell['parameters']:,}",
            f"{cell['zero']} {cell['precision']}",
            cell["link"] or "-",
            spread([r["samples_a_second"] for r in rounds]),
            spread([r["tokens_a_second"] for r in rounds]),
            spread(tflops),
            f"{statistics.median(tflops) * 1e12 / peak:.1%}" if peak else "-",
            spread(speed_ups(cell, yardstick(cell, cells))),
            paper_speed_up(cell["model"], cells[0]["model"]),
            f"{memory / 1e9:.2f}" if memory else "-",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return lines


def _splits(cells: list[dict]) -> list[str]:
    lines = [
        "| model | ZeRO | link | forward | backward | exposed communication | optimizer | "
        "data wait | other | MB on the wire a rank | share of the link |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in cells:
        rounds = cell["rounds"]
        columns = [cell["model"], f"{cell['zero']} {cell['precision']}", cell["link"] or "-"]
        for name in SECONDS.values():
            share = statistics.median(r[name] / r["seconds_a_step"] for r in rounds)
            columns.append(f"{share:.1%}")
        columns.append(f"{middle(rounds, lambda r: r['wire_bytes_a_step']) / 1e6:.2f}")
        columns.append(f"{middle(rounds, link_share(cell)):.0%}" if cell["link"] else "-")
        lines.append(f"| {' | '.join(columns)} |")
    return lines


def yardstick(cell: dict, cells: list[dict]) -> dict:
    """The first model's cell over the same link."""
    return next(c for c in cells if c["link"] == cell["link"])


def speed_ups(cell: dict, first: dict) -> list[float]:
    """Round by round, since only neighbours in time saw the same machine."""
    return [
        own["samples_a_second"] / other["samples_a_second"]
        for own, other in zip(cell["rounds"], first["rounds"], strict=True)
    ]


def paper_speed_up(model: str, first: str) -> str:
    if model not in PAPER or first not in PAPER:
        return "-"
    return f"{PAPER[model] / PAPER[first]:.2g}"


def link_share(cell: dict) -> Callable[[dict], float]:
    """Of the link's rate, what was sent across while a step waited for collectives."""

    def share(turn: dict) -> float:
        rate = 8 * turn["link_bytes_a_step"] / turn["communication_seconds"]
        return rate / cell["link_bits_per_second"]

    return share


def middle(rounds: list[dict], value: Callable[[dict], float]) -> float:
    return statistics.median(map(value, rounds))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.3g} ({min(values):,.3g} .. {max(values):,.3g})"
