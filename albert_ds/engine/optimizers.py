"""The optimizers that DeepSpeed's JSON may name, a row each.

A new one is a row here, and a file of `optim/` with what it computes. ZeRO cuts parameters into
pieces: an optimizer that needs whole tensors is told by `bind` what this rank holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from albert_ds.base.cli import Range
from albert_ds.base.plugin import Table
from albert_ds.optim.adam import MOMENTS, build_adamw
from albert_ds.optim.fused_lamb import build_fused_lamb, refuse_fused_lamb
from albert_ds.optim.lamb import build_lamb
from albert_ds.optim.muon import assign, build_muon, is_matrix, muon_moments, refuse_muon

BETA = Range(ge=0, lt=1)
PARAMS: dict[str, Any] = {
    "lr": ("auto", Range(ge=0, le=10)),  # as --learning-rate
    "betas": [BETA, BETA],
    "eps": Range(ge=0, le=1),
    "weight_decay": Range(ge=0, le=1e30),
}


def bind_norms(engine: Any) -> None:
    """Tell the optimizer of an `Engine` that needs norms of whole tensors what this rank holds."""
    engine.optimizer.bind(engine.fragments, is_counted=engine.is_counted, reduce=dist.all_reduce)


def bind_matrices(engine: Any) -> None:
    """Tell the optimizer of an `Engine` that needs whole matrices which rank collects each."""
    names = [name for name in engine.shapes if is_matrix(name)]
    ranks = assign([engine.shapes[name] for name in names], engine.mesh.world_size)
    rank_of = dict(zip(names, ranks, strict=True))
    engine.optimizer.bind(
        engine.fragments,
        lambda fragment, piece: engine.collect(fragment, piece, rank_of[fragment.name]),
        lambda fragment, whole: engine.spread(fragment, whole, rank_of[fragment.name]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """An optimizer: how it is built, bound and saved."""

    # Takes (name, parameter) pairs and the "params" of the JSON. Each group has a "rate_share":
    # its part of the learning rate.
    build: Callable[..., torch.optim.Optimizer]
    params: dict[str, Any]  # what the JSON may say: a schema of base/json_files.py
    bind: Callable[[Any], None] | None = None  # takes the `Engine`
    # Names of the states of a group's parameters, which checkpoints keep: of MOMENTS.
    moments: Callable[[dict], tuple[str, ...]] = lambda group: MOMENTS
    # How it keeps the number of updates of a parameter; by default in a tensor on the host.
    count: Callable[[int, Tensor], int | Tensor] = lambda updates, flat: torch.tensor(
        float(updates)
    )
    # Why a resolved JSON, or --tensor-parallel, does not go with it; None if all is well.
    refuse: Callable[[dict, int], str | None] = lambda ds_config, tensor_parallel: None


OPTIMIZERS = Table(Kind) | {
    "Lamb": Kind(build=build_lamb, params={**PARAMS, "bias_correction": bool}, bind=bind_norms),
    "AdamW": Kind(
        build=build_adamw,
        params=PARAMS,
        count=lambda updates, flat: torch.tensor(float(updates), device=flat.device),
    ),
    "Muon": Kind(
        build=build_muon,
        # AdamW's: what is no matrix of a block; its rate is "lr" unless stated.
        params={**PARAMS, "momentum": BETA, "adam_lr": Range(ge=0, le=10)},
        bind=bind_matrices,
        moments=muon_moments,
        refuse=refuse_muon,
    ),
    # DeepSpeed's CUDA kernel, a different LAMB (docs/notebook/lamb.md).
    "FusedLamb": Kind(
        build=build_fused_lamb,
        params={
            **PARAMS,
            "bias_correction": bool,
            "max_coeff": Range(ge=0, le=1e30),
            "min_coeff": Range(ge=0, le=1e30),
        },
        count=lambda updates, flat: updates,
        refuse=refuse_fused_lamb,
    ),
}
