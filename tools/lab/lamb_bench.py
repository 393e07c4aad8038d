#!/usr/bin/env python
"""Time a step of LAMB and of Muon against torch's fused AdamW, in turns, on one model's parameters.

The parameters are stored as ZeRO stores them on one rank: a flat vector of matrices and one of
biases and LayerNorms. AdamW reads and writes them once. LAMB needs the norms of the whole update
before it can apply any of it, so it needs a second pass. Muon multiplies the block's matrices.
"""

import time

import torch
from albert_lab.tables import table, three

from albert_ds.base import cli
from albert_ds.base.cli import Parser, positive
from albert_ds.base.files import write_report
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import SIZES
from albert_ds.optim.adam import decay_groups
from albert_ds.optim.fragments import ParamFragment
from albert_ds.optim.lamb import Lamb
from albert_ds.optim.muon import Muon, muon_groups, muon_moments
from albert_ds.optim.zero import init_states


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/lamb_bench.py", description=__doc__.splitlines()[0])
    add = parser.add
    add("--models", "sizes", nargs="+", choices=SIZES, default=["albert-base"])
    add("--rounds", "measured steps of each", "ROUNDS", positive, default=9)
    add("--output", "JSON file for the seconds of all steps", type=cli.new_file)
    return parser


def build_optimizers(name: str, device: torch.device) -> dict[str, torch.optim.Optimizer]:
    """LAMB, Muon and AdamW, each with its own copy of one model's flat parameters and gradients."""
    named = dict(AlbertForPretraining(SIZES[name]).named_parameters())
    groups = decay_groups(named.items(), 0.01)
    fragments = flatten(groups, named, device)
    lamb = Lamb(groups)
    lamb.bind(fragments)
    copies = [group["params"][0].detach().clone().requires_grad_() for group in groups]
    for copy in copies:
        copy.grad = torch.randn_like(copy)
    groups = muon_groups(named.items(), 0.01)
    fragments = flatten(groups, named, device)
    muon = Muon(groups)
    init_states(muon, fragments, muon_moments)
    for state in muon.state.values():
        state["step"] = 0

    def collect(fragment: ParamFragment, piece: torch.Tensor) -> torch.Tensor:
        return piece.view(named[fragment.name].shape)

    def spread(fragment: ParamFragment, whole: torch.Tensor | None) -> torch.Tensor:
        assert whole is not None
        return whole.reshape(-1)

    muon.bind(fragments, collect, spread)
    return {"LAMB": lamb, "Muon": muon, "AdamW, fused": torch.optim.AdamW(copies, fused=True)}


def flatten(groups: list[dict], named: dict, device: torch.device) -> list[ParamFragment]:
    """Make each group's parameters one, with a gradient; where each is in it."""
    name_of = {id(parameter): name for name, parameter in named.items()}
    fragments = []
    for index, group in enumerate(groups):
        parameters = group["params"]
        start = 0
        flat = torch.cat([p.detach().flatten() for p in parameters]).to(device).requires_grad_()
        flat.grad = torch.randn_like(flat)
        group["params"] = [flat]
        for p in parameters:
            place = {"start": start, "offset": 0, "numel": p.numel()}
            fragments.append(ParamFragment(name=name_of[id(p)], group=index, flat=flat, **place))
            start += p.numel()
    return fragments


def time_steps(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step of each, without the first."""
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
    rows = []
    for name, seconds in report.items():
        *others, adamw = seconds
        for kind in others:
            ratios = [a / b for a, b in zip(seconds[kind], seconds[adamw], strict=True)]
            rows.append((name, kind, *three(ratios)))
    print(table(("model", "optimizer", "over fused AdamW: min", "median", "max"), rows))
    if args.output:
        write_report(args.output, report)
    return 0


if __name__ == "__main__":
    cli.run(main)
