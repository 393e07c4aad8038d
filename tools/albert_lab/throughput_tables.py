"""Tables from a report of tools/throughput_bench.py: how fast, and where the time goes."""

import statistics
from pathlib import Path

import numpy as np

from albert_lab.tables import PARTS, SECONDS, spread, table

# "Speedup" of the paper's Table 2, against BERT-large.
PAPER = {
    "bert-base": 4.7,
    "bert-large": 1.0,
    "albert-base": 5.6,
    "albert-large": 1.7,
    "albert-xlarge": 0.6,
    "albert-xxlarge": 0.3,
}
FORMULA = (
    "FLOP per step: 6 x (tokens x (E H + L (4 H^2 + 2 H F)) + sum of squared lengths x 2 L H + "
    "masked x (H E + E V)), the first E H only if E is not H. Real tokens only; the forward pass "
    "that checkpointing repeats is not counted; the last layer is counted for every token"
)
SPEEDS = ("model", "parameters", "DeepSpeed", "checkpointing", "samples/s", "tokens/s")
SPEEDS += ("TFLOP/s per rank", "MFU", "speed-up", "paper", "peak GB")
STEPS = ("model", "DeepSpeed", "checkpointing", "step ms", "90th percentile")
# Of one rank, where a cell has it: on CUDA, and launches where torch's profiler sees them.
ON_CUDA = {
    "host_ms": ("host ms of a micro-batch", ".1f"),
    "update_ms": ("host ms of the update", ".1f"),
    "launches": ("launches a micro-batch", ",.0f"),
    "by_graph": ("run by graphs", ".1%"),
    "reserved_gb": ("GB reserved", ".2f"),
}
SPLIT = ("model", "DeepSpeed", "checkpointing", *PARTS.values(), "MB on the wire per rank")


def as_tables(report: dict) -> str:
    """Three tables of the cells of one layout. Its first model is the baseline of the speed-ups."""
    cells = report["cells"]
    first = cells[0]
    memory = (
        "tensors on the device"
        if report["on_gpu"]
        else "peak resident set of the process, with Python and its libraries"
    )
    parts = [
        f"{report['device']}; {first['ranks']} ranks, tensor parallel "
        f"{first['tensor_parallel']}, {first['micro_batch_size']} sequences of "
        f"{first['sequence_length']} tokens per micro-batch, {first['accumulation']} "
        f"micro-batches per step; median (min .. max) of {len(first['rounds'])} rounds",
        table(SPEEDS, [_speed(cell, first, report["peak_flops"]) for cell in cells]),
        steps_as_table(cells),
        table(SPLIT, map(_split, cells)),
        f"{FORMULA}. Peak memory of a rank: {memory}.",
    ]
    return "\n\n".join(parts)


def _speed(cell: dict, first: dict, peak: float | None) -> list[str]:
    rounds = cell["rounds"]
    tflops = [r["flops_a_second"] / cell["ranks"] / 1e12 for r in rounds]
    memory = rounds[-1]["peak_memory"]
    # Round by round: only neighbours in time saw the same speed of the machine.
    speed_ups = [
        own["samples_a_second"] / other["samples_a_second"]
        for own, other in zip(rounds, first["rounds"], strict=True)
    ]
    return [
        cell["model"],
        f"{cell['parameters']:,}",
        Path(cell["deepspeed_config"]).stem,
        cell["activation_checkpointing"],
        spread([r["samples_a_second"] for r in rounds]),
        spread([r["tokens_a_second"] for r in rounds]),
        spread(tflops),
        f"{statistics.median(tflops) * 1e12 / peak:.1%}" if peak else "-",
        spread(speed_ups),
        paper_speed_up(cell["model"], first["model"]),
        f"{memory / 1e9:.2f}" if memory else "-",
    ]


def steps_as_table(cells: list[dict]) -> str:
    """Single steps of all rounds, and what the host does for them."""
    known = [name for name in ON_CUDA if any(name in cell for cell in cells)]
    rows = []
    for cell in cells:
        seconds = [step for turn in cell["rounds"] for step in turn["step_seconds"]]
        row = [cell["model"], Path(cell["deepspeed_config"]).stem, cell["activation_checkpointing"]]
        row += [f"{1e3 * np.percentile(seconds, percent):,.1f}" for percent in (50, 90)]
        row += [format(cell[name], ON_CUDA[name][1]) if name in cell else "-" for name in known]
        rows.append(row)
    return table((*STEPS, *(ON_CUDA[name][0] for name in known)), rows)


def _split(cell: dict) -> list[str]:
    rounds = cell["rounds"]
    shares = [
        statistics.median(r[name] / r["seconds_a_step"] for r in rounds)
        for name in SECONDS.values()
    ]
    return [
        cell["model"],
        Path(cell["deepspeed_config"]).stem,
        cell["activation_checkpointing"],
        *(f"{share:.1%}" for share in shares),
        f"{statistics.median(r['wire_bytes_a_step'] for r in rounds) / 1e6:.2f}",
    ]


def paper_speed_up(model: str, baseline: str) -> str:
    if model not in PAPER or baseline not in PAPER:
        return "-"
    return f"{PAPER[model] / PAPER[baseline]:.2g}"
