#!/usr/bin/env python
"""Compare a pretraining step with Hugging Face's: same weights, sequences and type, in turns.

The peer is `AlbertForPreTraining` with torch's fused AdamW. It runs with each of its attentions,
compiled and not; compare with the fastest. It pads to the longest sequence of a batch, or with
--padding row to the full row, and scores every position; ours does neither. A step is forward,
backward and update of one micro-batch; reading the batch is not timed, nor is padding and copying
the peer's. Each round begins with another program. On a CPU a round in which a program got less
than nine tenths of its threads' time is disturbed by other work: only its CPU seconds count. The
table also has each program's time over that of our matrix products alone, as fast as one large
product, the first step's loss (without dropout the losses agree) and its seconds, which include
compiling.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from albert_lab.bench_run import bench_config
from albert_lab.tables import table, three
from torch.nn.utils.rnn import pad_sequence

from albert_ds.base import cli
from albert_ds.base.cli import Parser, Range, non_negative, positive
from albert_ds.base.files import write_report
from albert_ds.checkpoint.run_folder import read_versions
from albert_ds.data.micro_batch import MicroBatch
from albert_ds.model.config import SIZES, ModelConfig
from albert_ds.model.hugging_face import to_hf
from albert_ds.parallel.consensus import Counts
from albert_ds.parallel.mesh import build_mesh
from albert_ds.process.rendezvous import join_world
from albert_ds.process.world import read_world
from albert_ds.settings.pretrain import RunConfig

if TYPE_CHECKING:
    from albert_ds.training.pretrain import Run

OURS = "albert-ds"
PEERS = ("sdpa", "eager", "sdpa compiled", "eager compiled")
FLASH = ("flash_attention_2", "flash_attention_2 compiled")  # where flash-attn is installed
IGNORED = -100  # label of a position without one
CALM = 0.9  # of the threads' time, at least, in a round that nothing disturbs
SQUARE = 2048  # rows of the large matrix product


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/peer_bench.py", description=__doc__)
    add = parser.add
    albert = [name for name in SIZES if name.startswith("albert")]
    add("--model", "size", choices=albert, default="albert-base")
    text = "sequences of a step (default: 32 on a GPU, 4 on a CPU)"
    add("--micro-batch-size", text, "SAMPLES", positive)
    add("--sequence-length", "tokens of a full row", "TOKENS", positive, default=512)
    text = "folders of build_shards.py (default: full rows of random tokens)"
    add("--data", text, type=cli.path, nargs="+")
    add("--padding", "width to which the peer pads", choices=("longest", "row"), default="longest")
    text = "attentions of the peer (default: all that are installed)"
    add("--peers", text, nargs="+", choices=(*PEERS, *FLASH))
    add("--dropout", "probability, in both (default: the size's)", "P", Range(ge=0, lt=1))
    text = "DeepSpeed's JSON; its type is the peer's too (default: of ds_configs/ "
    text += "zero1_bf16_adamw.json on a GPU, zero1_fp32_adamw.json on a CPU)"
    add("--deepspeed_config", text, type=cli.path)
    add("--warmup", "steps of each that do not count", "STEPS", non_negative, default=1)
    add("--rounds", "steps of each that count", "ROUNDS", positive, default=5)
    add("--output", "JSON with every raw number", type=cli.new_file)
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


class Peer:
    """Hugging Face's model with our run's weights, and an optimizer."""

    def __init__(self, run: Run, kind: str, row: int | None):
        from transformers import AlbertConfig, AlbertForPreTraining  # slow to import

        attention, *compiled = kind.split()
        state = {k: v.detach().cpu() for k, v in run.engine.deepspeed.module.state_dict().items()}
        hf_config, hf_state = to_hf(run.config.model, state)
        hf_config["classifier_dropout_prob"] = run.config.model.dropout  # the sentence head's
        hf_config["attn_implementation"] = attention
        model = AlbertForPreTraining(AlbertConfig(**hf_config))
        model.load_state_dict(
            model.state_dict() | {name: value.clone() for name, value in hf_state.items()}
        )
        dtype = next(iter(state.values())).dtype
        self.device = run.device
        self.row = row
        self.model = model.to(self.device, dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if compiled:
            self.model.compile(dynamic=None)

    def rows(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """A padded copy of `batch` on the device. Full rows have no mask: attention is faster."""
        rows = pad_batch(batch, self.row)
        if rows["attention_mask"].all():
            del rows["attention_mask"]
        return {name: x.to(self.device) for name, x in rows.items()}

    def step(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """One optimizer step; the loss before it, a scalar."""
        loss = self.model(**rows).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def pad_batch(batch: MicroBatch, row: int | None) -> dict[str, Any]:
    """Inputs of Hugging Face's model: [B, T] with T = `row` or the longest sequence's length."""
    tensors: dict[str, Any] = batch.tensors
    lengths = tensors["cu_seqlens"].diff().tolist()
    width = row or max(lengths)
    labels = torch.full_like(tensors["input_ids"], IGNORED)
    labels[tensors["masked_positions"]] = tensors["masked_labels"]

    def pad(flat, value: int = 0):
        # The first row sets the width of all rows; then it is removed.
        parts = [flat.new_zeros(width), *flat.split(lengths)]
        return pad_sequence(parts, batch_first=True, padding_value=value)[1:]

    return {
        "input_ids": pad(tensors["input_ids"]),
        "token_type_ids": pad(tensors["token_type_ids"]),
        "attention_mask": pad(torch.ones_like(tensors["input_ids"])),
        "labels": pad(labels, IGNORED),
        "sentence_order_label": tensors["pair_labels"],
    }


def fill_defaults(args, *, on_gpu: bool) -> None:
    """What was not typed. Small passes of a GPU are bound by their launches, not by its speed."""
    file = "zero1_bf16_adamw.json" if on_gpu else "zero1_fp32_adamw.json"
    args.deepspeed_config = args.deepspeed_config or f"ds_configs/{file}"
    args.micro_batch_size = args.micro_batch_size or (32 if on_gpu else 4)
    args.peers = args.peers or [*PEERS, *(FLASH if find_spec("flash_attn") else ())]


def config_of(args) -> RunConfig:
    model = SIZES[args.model]
    if args.dropout is not None:
        model = replace(model, dropout=args.dropout)
    return bench_config(
        args.model,
        model,
        deepspeed_config=args.deepspeed_config,
        micro_batch_size=args.micro_batch_size,
        sequence_length=args.sequence_length,
        data=args.data,
    )


def measure(args) -> dict:
    """Seconds of every step; in a round all take a step on one batch."""
    from albert_lab.measurement import count_step_flops, open_bench_run

    from albert_ds.training.pretrain import next_batch

    device = join_world(read_world())
    fill_defaults(args, on_gpu=device.type == "cuda")
    config = config_of(args)
    mesh = build_mesh(1)
    run = open_bench_run(config, mesh, device)
    row = args.sequence_length if args.padding == "row" else None
    peers = {kind: Peer(run, kind, row) for kind in args.peers}
    rounds = []
    loads = []
    fills = []
    losses = {}
    first_seconds = {}
    flops = 0.0
    dtype = next(run.engine.deepspeed.module.parameters()).dtype
    for number in range(args.warmup + args.rounds):
        batch = next_batch(run)
        (micro_batch,) = batch.micro_batches
        losses = losses or {OURS: loss_of(run, micro_batch)}
        turns = take_round(run, peers, batch, number)
        if number == 0:
            first_seconds = {kind: turn[0] for kind, turn in turns.items()}
            losses |= {kind: float(turns[kind][2]) for kind in peers}
        if number >= args.warmup:
            rounds.append(turns)
            loads.append(os.getloadavg()[0])
            flops += count_step_flops(run, batch.counts) - count_spared(config.model, batch.counts)
            width = row or int(micro_batch.tensors["max_seqlen"])
            fills.append(micro_batch.tokens / (micro_batch.samples * width))
    return {
        "device": device.type,
        "settings": {name: str(value) for name, value in vars(args).items()},
        "versions": read_versions(),
        "first_losses": losses,
        "first_seconds": first_seconds,
        "fill": statistics.mean(fills),
        "rounds": [{kind: turn[0] for kind, turn in turns.items()} for turns in rounds],
        "cpu_rounds": [{kind: turn[1] for kind, turn in turns.items()} for turns in rounds],
        "threads": torch.get_num_threads(),
        "loads": loads,  # programs that wanted a core, in the minute before
        "product_seconds": flops * seconds_a_flop(device, dtype),
    }


def take_round(run: Run, peers: dict[str, Peer], batch, number: int) -> dict[str, tuple]:
    """What `clock` says of a step of each program; another one begins in each round."""
    from albert_ds.training.pretrain import train_step

    kinds = [OURS, *peers]
    turns: dict[str, tuple] = dict.fromkeys(kinds, ())
    first = number % len(kinds)
    for kind in kinds[first:] + kinds[:first]:
        work = partial(train_step, run, batch)
        if kind in peers:
            work = partial(peers[kind].step, peers[kind].rows(*batch.micro_batches))
        turns[kind] = clock(run.device, work)
    return turns


def count_spared(model: ModelConfig, counts: Counts) -> float:
    """FLOPs that `count_flops` counts and the last layer leaves out: no head needs all tokens."""
    h = model.hidden_size
    f = model.ffn_size
    length = counts.squared_lengths / counts.tokens
    unneeded = counts.tokens - counts.masked - counts.samples  # each [CLS] is needed
    return 6 * unneeded * (2 * h * h + 2 * h * f + 2 * h * length)


def seconds_a_flop(device: torch.device, dtype: torch.dtype) -> float:
    """Of a large matrix product; of a CPU's, by all its threads together."""
    square = torch.ones(SQUARE, SQUARE, device=device, dtype=dtype)
    clock(device, lambda: square @ square)
    turns = [clock(device, lambda: square @ square) for _ in range(5)]
    on_cpu = device.type == "cpu"
    return min(turn[on_cpu] for turn in turns) / (2 * SQUARE**3)


def loss_of(run: Run, batch: MicroBatch) -> float:
    """Our loss in evaluation mode, as the mean that Hugging Face reports."""
    module = run.engine.deepspeed.module
    with torch.no_grad():
        outputs = module.eval()(**batch.on(run.device))
    module.train()
    pairs = outputs["pair_loss_sum"] / max(batch.pairs, 1)
    return float(outputs["mlm_loss_sum"] / batch.masked + pairs)


def clock(device: torch.device, work: Callable) -> tuple[float, float, Any]:
    """Seconds until the device has finished `work`, those of the CPU's threads, and its result."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    cpu_started = time.process_time()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - cpu_started, result


def is_calm(seconds: dict[str, float], cpu_seconds: dict[str, float], threads: int) -> bool:
    """Every program got the time of its threads in this round."""
    return all(cpu_seconds[kind] >= CALM * threads * seconds[kind] for kind in seconds)


def as_table(report: dict) -> str:
    """A line per peer: its time / ours, over the calm rounds together and over single ones.

    Batches of real text fill the peer's rows differently, so single rounds also differ by that.
    """
    rounds = report["rounds"]
    settings = report["settings"]
    on_cpu = report["device"] == "cpu"
    losses, first, loads = report["first_losses"], report["first_seconds"], report["loads"]
    calm = [turn for turn, cpu in zip(rounds, report["cpu_rounds"], strict=True)
            if not on_cpu or is_calm(turn, cpu, report["threads"])]  # fmt: skip
    cpu_total, total = (
        {kind: sum(r[kind] for r in some) for kind in rounds[0]}
        for some in (report["cpu_rounds"], calm)
    )
    costs = cpu_total if on_cpu else total  # that no other work disturbs
    best = min((kind for kind in costs if kind != OURS), key=costs.__getitem__)
    rows = []
    for kind in total:
        mark = " (its best)" if kind == best else ""
        cells = ["-"] * 4
        if calm:
            low, middle, high = three([r[kind] / r[OURS] for r in calm])
            cells = [f"{total[kind] / total[OURS]:.2f}", middle, low, high]
        cells += [f"{cpu_total[kind] / cpu_total[OURS]:.2f}"]
        cells += [f"{costs[kind] / report['product_seconds']:.2f}"]
        rows.append([kind + mark, *cells, f"{losses[kind]:.5f}", f"{first[kind]:.1f}"])
    header = ("", "together", "median", "min", "max", "CPU seconds", "over our products")
    header += ("first loss", "first step, s")
    title = (
        f"{settings['model']}, {settings['micro_batch_size']} sequences per step, "
        f"{Path(settings['deepspeed_config']).name}, {report['device']}; the peer's rows are "
        f"{report['fill']:.1%} full; time / ours over {len(rounds)} rounds, of which "
        f"{len(rounds) - len(calm)} disturbed by other work are left out, by CPU seconds over all; "
        f"load {min(loads):.1f} .. {max(loads):.1f}"
    )
    return f"{title}\n\n{table(header, rows)}"


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    report = measure(args)
    print(as_table(report))
    if args.output:
        write_report(args.output, report)
    return 0


if __name__ == "__main__":
    cli.run(main)
