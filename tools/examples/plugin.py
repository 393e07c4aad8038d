"""Rows of your own in tables of albert-ds: a pattern of sharing, an optimizer, a term of the loss.

albert-ds train --plugin plugin.py --sharing ends ...

Copy it and keep what you need. All tables: docs/architecture.md, "Where do I change it".
"""

import torch

from albert_ds.base.cli import Range
from albert_ds.engine.optimizers import OPTIMIZERS, PARAMS, Kind
from albert_ds.model.albert import TERMS, Term
from albert_ds.model.sharing import PATTERNS, Pattern
from albert_ds.optim.adam import decay_groups

# --sharing ends
PATTERNS["ends"] = Pattern(
    form="ends",
    meaning="one block for both ends, one for the middle",
    plan=lambda value, layers: [(int(0 < n < layers - 1),) * 2 for n in range(layers)],
)


class SignOfMomentum(torch.optim.Optimizer):
    """m = b m + (1 - b) g; w -= lr sign(m)"""

    def __init__(self, parameters, *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0):
        super().__init__(decay_groups(parameters, weight_decay), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] += 1
                    state["exp_avg"].lerp_(p.grad, 1 - group["momentum"])
                    p.add_(state["exp_avg"].sign(), alpha=-group["lr"])


# "type": "Sign" in DeepSpeed's JSON
OPTIMIZERS["Sign"] = Kind(
    build=SignOfMomentum,
    params={**PARAMS, "momentum": Range(ge=0, lt=1)},
    moments=lambda group: ("exp_avg",),
)


def compute_size(model, states):
    """A hundredth of the pooled states' squares, while training."""
    return (0.01 * states.pooled.float().square().sum(),) if model.training else None


# In the loss of every run with this file; `size_loss` in its metrics.jsonl
TERMS["size"] = Term(compute=compute_size, per="pairs")
