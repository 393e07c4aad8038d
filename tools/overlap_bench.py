#!/usr/bin/env python
"""How much of the gradients' reduction hides behind backward, and what sharing takes away.

A gradient can be reduced while backward goes on, once it is complete. A BERT layer's is complete
when backward has passed the layer; a shared block's only when it has passed the first one. Four
ways to take a step of the same model over the same link, in turns:

    after         backward, then one reduction of everything: nothing hides
    as complete   each tensor's reduction begins when autograd has completed it
    deferred      the same, with a shared weight's gradient formed as one product over all its uses
                  (albert_ds/model/deferred.py), one weight after the other behind the backward pass
    none          no reduction, for what the rest costs

Exposed is what a step takes beyond `none`. Ranks lie on nodes of their own, joined by links of the
given rate (Linux, root).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.errors import ENDINGS
from albert_ds.flags import Parser, positive
from albert_ds.measure.link import open_nodes, parse_rate, shape
from albert_ds.measure.memory import PeakMemory
from albert_ds.measure.ranks import start_ranks
from albert_ds.model.config import SIZES
from albert_ds.runtime.ending import say
from albert_ds.runtime.launch import join_world, read_world

if TYPE_CHECKING:
    import torch

WAYS = ("none", "after", "as complete", "deferred")


def build_parser() -> Parser:
    parser = Parser(
        prog="tools/overlap_bench.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, default=["bert-base", "albert-base"])
    add("--nodes", type=positive, default=2, help="one rank on each (%(default)s)")
    add("--link", type=parse_rate, default=parse_rate("1gbit"), help="such as 100mbit (1gbit)")
    add("--micro-batch-size", type=positive, default=2, help="sequences a rank (%(default)s)")
    add("--sequence-length", type=positive, default=128, help="tokens of a row (%(default)s)")
    add("--rounds", type=positive, default=5, help="steps of each way that count (%(default)s)")
    add("--output", type=Path, help="JSON with every raw number")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if read_world().launcher == "none":
        with open_nodes(args.nodes) as nodes:
            return start_ranks(argv, args.nodes, nodes)
    import torch.distributed as dist

    device = join_world(read_world())
    shape(args.link, None)
    report = {name: time_ways(name, args, device) for name in args.models}
    if dist.get_rank() == 0:
        print(as_table(report, args))
        if args.output:
            settings = {name: str(value) for name, value in vars(args).items()}
            args.output.write_text(json.dumps({"settings": settings, **report}, indent=1) + "\n")
    return 0


def time_ways(name: str, args, device: torch.device) -> dict:
    """Seconds of every step of one model, by way, and its peak memory by way. Collective."""
    import torch.distributed as dist

    steps, peaks = {}, {}
    base = None
    for way in WAYS:
        memory = PeakMemory(device, base)
        base = memory.base
        steps[way] = Step(name, way, args)
        memory.restart()
        steps[way]()
        peaks[way] = memory.read() - base
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - started)
    return {"seconds": seconds, "peak_bytes": peaks}


class Step:
    """A new model and one way to reduce its gradients; called, it takes a step but the update."""

    def __init__(self, name: str, way: str, args):
        import torch.distributed as dist

        from albert_ds.data.samples import StreamConfig
        from albert_ds.data.synthetic import synthetic_batches
        from albert_ds.model.albert import AlbertForPretraining
        from albert_ds.model.deferred import defer_weight_gradients

        size = replace(SIZES[name], dropout=0.0)
        self.way, self.pending = way, []
        self.model = AlbertForPretraining(size).train()
        if way == "deferred":
            defer_weight_gradients(self.model.albert.encoder)
        if way in ("as complete", "deferred"):
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(self._begin_reduction)
        batches = synthetic_batches(
            StreamConfig(sequence_length=args.sequence_length),
            vocab_size=size.vocab_size,
            micro_batch_size=args.micro_batch_size,
            seed=dist.get_rank(),
        )
        self.batch = next(batches).tensors

    def __call__(self) -> None:
        self.model.zero_grad()
        outputs = self.model(**self.batch)
        (outputs["mlm_loss_sum"] + outputs["pair_loss_sum"]).backward()
        if self.way == "after":
            self._reduce_all()
        for work in self.pending:
            work.wait()
        self.pending.clear()

    def _begin_reduction(self, parameter: torch.Tensor) -> None:
        import torch.distributed as dist

        self.pending.append(dist.all_reduce(parameter.grad, async_op=True))

    def _reduce_all(self) -> None:
        import torch
        import torch.distributed as dist

        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.view(-1).copy_(part)


def as_table(report: dict, args) -> str:
    """A line a model and way: what is exposed against the way that hides nothing, and memory."""
    rate = args.link.text if args.link else "no limit"
    lines = [
        f"{args.nodes} nodes, {rate}, {args.micro_batch_size} x {args.sequence_length} tokens a "
        f"rank; over {args.rounds} rounds",
        "",
        "| model | reduction | exposed against after: median (min .. max) | step against after "
        "| peak memory MB |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, found in report.items():
        seconds = found["seconds"]
        for way in WAYS[1:]:
            shares, ratios = [], []
            for bare, after, own in zip(
                seconds["none"], seconds["after"], seconds[way], strict=True
            ):
                shares.append((own - bare) / (after - bare))
                ratios.append(own / after)
            lines.append(
                f"| {name} | {way} | {statistics.median(shares):.0%} ({min(shares):.0%} .. "
                f"{max(shares):.0%}) | {statistics.median(ratios):.2f} | "
                f"{found['peak_bytes'][way] / 1e6:,.0f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ENDINGS as ending:
        say(str(ending))
        sys.exit(ending.code)
