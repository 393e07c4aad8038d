"""Muon as the tests train with it, and alone in one process."""

import torch

from albert_ds.optim.fragments import ParamFragment
from albert_ds.optim.muon import Muon

# What `reference_training(muon=True)` computes; the rate is small_config's.
DS_CHANGES = {
    "optimizer": {
        "type": "Muon",
        "params": {
            "lr": 0.01,
            "adam_lr": 0.005,
            "momentum": 0.9,
            "betas": [0.9, 0.999],
            "eps": 1e-6,
            "weight_decay": 0.01,
        },
    }
}


def build_alone(matrices: list[torch.nn.Parameter], **settings) -> Muon:
    """Muon of whole matrices in one process."""
    group = {"params": matrices, "orthogonal": True, "weight_decay": 0.1}
    optimizer = Muon([group], **settings)
    for matrix in matrices:
        optimizer.state[matrix] = {"step": 0, "exp_avg": torch.zeros_like(matrix)}
    fragments = [
        ParamFragment(name=str(n), group=0, flat=matrix, start=0, offset=0, numel=matrix.numel())
        for n, matrix in enumerate(matrices)
    ]
    optimizer.bind(
        fragments,
        lambda fragment, piece: piece.view(fragment.flat.shape),
        lambda fragment, whole: whole.reshape(-1),
    )
    return optimizer
