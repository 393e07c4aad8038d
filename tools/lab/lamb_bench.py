#!/usr/bin/env python
"""Time a step of LAMB against one of torch's fused AdamW, in turns, on the same parameters.

The parameters are stored as ZeRO stores them on one rank: a flat vector of matrices and one of
biases and LayerNorms. AdamW reads and writes them once. LAMB needs the norms of the whole update
before it can apply any of it, so it needs a second pass.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from albert_lab.tables import table, three

from albert_ds import cli
from albert_ds.cli import Parser, positive
from albert_ds.files import write_report
from albert_ds.model.config import SIZES

if TYPE_CHECKING:
    import torch


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/lamb_bench.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, default=["albert-base"], help="sizes")
    add("--rounds", type=positive, default=9, metavar="ROUNDS", help="measured steps of each")
    add("--output", type=cli.new_file, help="JSON file for the seconds of all steps")
    return parser


def build_optimizers(name: str, device: torch.device) -> dict[str, torch.optim.Optimizer]:
    """LAMB and AdamW, each with its own copy of one model's flat parameters and gradients."""
    import torch

    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.optim.lamb import Lamb, TensorPart, decay_groups

    model = AlbertForPretraining(SIZES[name])
    groups = decay_groups(model.named_parameters(), 0.01)
    parts, flats = {}, []
    for group in groups:
        sizes = [p.numel() for p in group["params"]]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        flat = torch.cat([p.detach().flatten() for p in group["params"]]).to(device)
        group["params"] = [flat.requires_grad_()]
        flat.grad = torch.randn_like(flat)
        flats.append(flat)
        parts[flat] = [
            TensorPart(tensor=i, start=start, numel=size)
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
    lamb = Lamb(groups)
    for group, flat in zip(lamb.param_groups, flats, strict=True):
        group["num_tensors"] = len(parts[flat])
    lamb.bind(parts, reduce=lambda sums: None)
    copies = [flat.detach().clone().requires_grad_() for flat in flats]
    for copy, flat in zip(copies, flats, strict=True):
        copy.grad = flat.grad.clone()
    return {"LAMB": lamb, "AdamW, fused": torch.optim.AdamW(copies, fused=True)}


def time_steps(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step of each, without the first."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    optimizers = build_optimizers(name, device)
    seconds: dict[str, list[float]] = {kind: [] for kind in optimizers}
    for _ in range(1 + rounds):
        for kind, optimizer in optimizers.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[kind].append(time.perf_counter() - started)
    return {kind: values[1:] for kind, values in seconds.items()}


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    report = {name: time_steps(name, args.rounds) for name in args.models}
    ratios = {
        name: [lamb / adamw for lamb, adamw in zip(*seconds.values(), strict=True)]
        for name, seconds in report.items()
    }
    rows = [(name, *three(values)) for name, values in ratios.items()]
    print(table(("model", "LAMB / fused AdamW: min", "median", "max"), rows))
    if args.output:
        write_report(args.output, report)
    return 0


if __name__ == "__main__":
    cli.run(main)
