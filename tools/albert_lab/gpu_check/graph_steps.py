"""Steps by CUDA graphs beside eager ones, in one process: are they equal, and how fast are they?"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from albert_ds.engine.graphs import use_own_stream
from albert_ds.model.attention import VarlenAttention
from albert_ds.process.rendezvous import use_deterministic_algorithms
from albert_ds.training.metrics import peak_flops
from albert_ds.training.pretrain import Run, next_batch, train_step
from albert_lab.gpu_check.records import Records
from albert_lab.gpu_check.steps import Bench
from albert_lab.host_time import describe_graphs
from albert_lab.measurement import count_step_flops, take_step

STEPS = 30  # that graphs and eager launches take alike
ENOUGH = 2.0  # seconds of measured steps
MOST = 60  # measured steps


def open_run(bench: Bench, micro: int, rows: str, data: str, *, graphs: bool) -> Run:
    name, length = ("albert-tiny", 64) if bench.quick else ("albert-base", 512)
    changes = {"num_heads": 2} if bench.quick else {}
    text = data if rows == "text" else ""
    options = {"length": length, "data": text, "no_graphs": not graphs}
    return bench.open_run(name, micro, "none", **options, **changes)


def check_graphs(run: Run) -> dict:
    """`describe_graphs` of a run whose graphs were not all refused."""
    facts = describe_graphs(run)
    if facts.get("refused") and not facts["graphs"]:
        raise RuntimeError(f"nothing was captured: {facts['refused']}")
    return facts


def take_steps(bench: Bench, micro: int, rows: str, data: str, *, graphs: bool) -> dict:
    """The losses, norms and weights of some steps, on the host."""
    run = open_run(bench, micro, rows, data, graphs=graphs)
    losses, norms = [], []
    for _ in range(8 if bench.quick else STEPS):
        run.window.reset()
        take_step(run)
        losses.append(run.window.outputs.tolist())
    weights = [p.detach().float().cpu() for p in run.engine.deepspeed.module.parameters()]
    described = check_graphs(run)
    run.engine.deepspeed.destroy()
    return {"losses": losses, "norms": norms, "weights": weights, "graphs": described}


def distance(one: dict, other: dict) -> float:
    pairs = zip(one["weights"], other["weights"], strict=True)
    off = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    return off / sum(float(a.square().sum()) for a in one["weights"]) ** 0.5


def compare(bench: Bench, micro: int, rows: str, data: str, deterministic: bool) -> dict:
    """Graphs beside eager launches, which are taken twice if they need not repeat themselves."""
    take = partial(take_steps, bench, micro, rows, data)
    eager, by_graph = take(graphs=False), take(graphs=True)
    comparison = {**by_graph["graphs"], "graph_off": distance(eager, by_graph)}
    same = sum(a == b for a, b in zip(eager["losses"], by_graph["losses"], strict=True))
    comparison["same_steps"], comparison["last_loss"] = same, [eager["losses"][-1][0]]
    comparison["last_loss"].append(by_graph["losses"][-1][0])
    if not deterministic:
        comparison["eager_off"] = distance(eager, take(graphs=False))
    elif comparison["graph_off"] or same < len(eager["losses"]):
        raise ValueError(f"graphs differ from eager launches: {comparison}")
    return comparison


def measure_equality(records: Records, quick: bool, data: str) -> None:
    use_deterministic_algorithms()
    bench = Bench(quick)
    for rows, micro in (("text", 8), ("random", 8)) if quick else (("text", 64), ("text", 8)):
        work = partial(compare, bench, micro, rows, data, True)
        records.measure("graphs equal, deterministic", work, needs=8, rows=rows, micro=micro)


def time_steps(bench: Bench, micro: int, rows: str, data: str, graphs: bool) -> dict:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # captures are part of what a run reserves
    begun = time.perf_counter()
    run = open_run(bench, micro, rows, data, graphs=graphs)
    peak = peak_flops(bench.device)
    seconds: list[float] = []
    rates: list[float] = []
    shares: list[float] = []  # of the peak
    waits = []
    warm = 6
    enough = 0.2 if bench.quick else ENOUGH
    while len(seconds) < warm + 5 or (sum(seconds[warm:]) < enough and len(seconds) < warm + MOST):
        started = time.perf_counter()
        batch = next_batch(run)
        waits.append(time.perf_counter() - started)
        train_step(run, batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        rates.append(batch.counts.tokens / seconds[-1])
        shares.append(count_step_flops(run, batch.counts) / seconds[-1] / (peak or 1))
    steps = sorted(seconds[warm:])
    figures = {
        "tokens_a_second": round(statistics.median(rates[warm:])),
        "mfu": round(statistics.median(shares[warm:]), 4) if peak else None,
        "step_ms": round(1e3 * statistics.median(steps), 2),
        "p90_ms": round(1e3 * steps[int(0.9 * (len(steps) - 1))], 2),
        "wait_ms": round(1e3 * statistics.median(waits[warm:]), 2),
        "steps": len(steps),
        "first_ms": [round(1e3 * s) for s in seconds[:warm]],
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 3),
        "whole_s": round(time.perf_counter() - begun, 1),
        **check_graphs(run),
    }
    if graphs:
        run.engine.deepspeed.module.graphs = None  # its memory goes before the next one
    run.engine.deepspeed.destroy()
    return figures


def measure_graphs(records: Records, quick: bool, data: str) -> None:
    bench = Bench(quick)
    cells = [("text", 64), ("random", 64), ("text", 8), ("random", 8)]
    for rows, micro in cells[2:] if quick else cells:
        for graphs in (True, False):
            work = partial(time_steps, bench, micro, rows, data, graphs)
            facts = {"rows": rows, "micro": micro, "by": "graphs" if graphs else "eager"}
            records.measure("graph speed", work, needs=6, **facts)


# --- after a failure: which part cannot be captured ---


def capture_part(work: Callable[[], object]) -> dict:
    """Run twice, capture, replay."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        raise RuntimeError("".join(traceback.format_exception(error))[-2500:]) from None
    return {}


def list_parts(bench: Bench, data: str) -> dict[str, Callable[[], object]]:
    micro = 8
    run = open_run(bench, micro, "random", data, graphs=False)
    model = run.engine.deepspeed.module
    device = run.device
    tensors = next_batch(run).micro_batches[0].on(device)
    scales = torch.ones(2, device=device)
    parameters = list(model.parameters())
    ends, longest = tensors["cu_seqlens"], tensors["max_seqlen"]
    tokens = len(tensors["input_ids"])
    width = 64
    heads = [
        torch.randn(tokens, 2, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]

    def attend(dropout: float) -> Tensor:
        return VarlenAttention(dropout).train()(*heads, ends, ends, longest)

    def both(y: Tensor, inputs) -> None:
        torch.autograd.grad(y.float().sum(), inputs, allow_unused=True)

    def embed() -> Tensor:
        names = ("input_ids", "token_type_ids", "position_ids")
        return model.albert.embeddings(*(tensors[name] for name in names))

    def encode() -> Tensor:
        names = ("input_ids", "token_type_ids", "position_ids", "cu_seqlens")
        given = {name: tensors[name] for name in names}
        return model.albert(**given, max_seqlen=longest, seeds=tensors["seeds"])[
            "last_hidden_state"
        ]

    def lose() -> Tensor:
        return model(**tensors, scales=scales)["loss"]

    return {
        "a sum": lambda: heads[0].sum(),
        "a product": lambda: heads[0].flatten(1) @ heads[1].flatten(1).T,
        "a sort and searches": lambda: torch.searchsorted(
            torch.cat([ends[:-1], tensors["masked_positions"]]).sort()[0], ends
        ),
        "attention forward": lambda: attend(0.0),
        "attention forward with dropout": lambda: attend(0.1),
        "attention both ways with dropout": lambda: both(attend(0.1), heads),
        "embedding both ways": lambda: both(embed(), list(model.albert.embeddings.parameters())),
        "encoder forward": encode,
        "encoder both ways": lambda: both(encode(), list(model.albert.encoder.parameters())),
        "all forward": lose,
        "all both ways": lambda: both(lose(), parameters),
    }


def capture_parts(records: Records, quick: bool, data: str) -> None:
    use_own_stream(torch.device("cuda", 0))
    bench = Bench(quick)
    parts = list_parts(bench, data)
    for name, work in parts.items():
        records.measure("capture", partial(capture_part, work), needs=2, part=name)
