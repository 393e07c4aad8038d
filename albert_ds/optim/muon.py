"""Muon for the matrices of the blocks, AdamW for all else (Jordan 2024; Liu et al. 2025).

    m  = b m + (1 - b) g
    o  = orthogonalize((1 - b) g + b m)                   Nesterov, as torch.optim.Muon
    w  = (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) o

The scale is Moonlight's ("match_rms_adamw" in torch): an update is as large as one of AdamW, so
both take the same rate and decay. Embeddings, heads, biases, LayerNorms and what layers have of
their own are AdamW's.

Newton-Schulz needs a whole logical matrix, of which ZeRO and tensor parallelism leave a process
only pieces. Each matrix has one process that collects it, orthogonalizes it and spreads the result:
the work is done once, and no number depends on how a matrix is cut. It is done in fp32 on every
device, since bf16 would be 1e-2 off. This file knows no ranks.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from albert_ds.optim.adam import (
    MOMENTS,
    WEIGHT_DECAY,
    NamedParameters,
    compute_updates,
    decay_groups,
)
from albert_ds.optim.fragments import ParamFragment
from albert_ds.optim.norms import compute_norms

STEPS = 5  # Jordan's, as the coefficients
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # least norm that a matrix is divided by
SCALE = 0.2  # root mean square of an update of AdamW


def build_muon(
    parameters: NamedParameters,
    *,
    lr: float,
    weight_decay: float = WEIGHT_DECAY,
    adam_lr: float | None = None,
    **params,
) -> "Muon":
    """Muon of all parameters; the rate of what AdamW updates is `adam_lr`, or `lr`."""
    adam_share = 1.0 if adam_lr is None else adam_lr / lr
    return Muon(muon_groups(parameters, weight_decay, adam_share), lr=lr, **params)


def refuse_muon(ds_config: dict, tensor_parallel: int) -> str | None:
    """Why this configuration cannot run, if it cannot."""
    params = ds_config["optimizer"]["params"]
    if "adam_lr" in params and not params["lr"]:
        return '"adam_lr" is a share of "lr": that must be above 0'
    return None


def muon_moments(group: dict) -> tuple[str, ...]:
    """Matrices have a momentum and no second moment."""
    return MOMENTS[:1] if group["orthogonal"] else MOMENTS


def is_matrix(name: str) -> bool:
    """Whether a parameter is a projection of a block, which Muon updates."""
    if not name.startswith("albert.encoder.") or ".own." in name:
        return False
    return name.endswith(".weight") and "layer_norm" not in name


def muon_groups(
    parameters: NamedParameters,
    weight_decay: float,
    adam_share: float = 1.0,
) -> list[dict]:
    """The matrices of the blocks, and the `decay_groups` of all else.

    The rate of all else is `adam_share` of the matrices' rate.
    """
    named = list(parameters)
    others = decay_groups([p for p in named if not is_matrix(p[0])], weight_decay)
    for group in others:
        group |= {"orthogonal": False, "rate_share": adam_share}
    return [
        {
            "params": [parameter for name, parameter in named if is_matrix(name)],
            "weight_decay": weight_decay,
            "rate_share": 1.0,
            "orthogonal": True,
        },
        *others,
    ]


def orthogonalize(matrix: Tensor) -> Tensor:
    """U S V^T -> U S' V^T with S' near 1, by Newton-Schulz."""
    x = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    x = x / compute_norms([x])[0].to(x.dtype).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if len(matrix) <= matrix.shape[1] else x.T


def assign(shapes: list[torch.Size], num_workers: int) -> list[int]:
    """The worker that orthogonalizes each matrix; the one who has most to do has little more."""
    costs = [min(shape) * math.prod(shape) for shape in shapes]
    workers = [0] * len(shapes)
    loads = [0] * num_workers
    for matrix in sorted(range(len(shapes)), key=lambda matrix: -costs[matrix]):
        workers[matrix] = loads.index(min(loads))
        loads[workers[matrix]] += costs[matrix]
    return workers


class Muon(torch.optim.Optimizer):
    """Muon over flat parameters for groups that are `orthogonal`, AdamW for the others.

    Args:
        params: the groups of `muon_groups`.
        lr: learning rate.
        momentum: decay rate of the matrices' momentum.
        betas: decay rates of AdamW's first and second moment.
        eps: added to the root of AdamW's second moment.
    """

    def __init__(
        self,
        params,
        lr: float = 0.001,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ):
        defaults = dict(lr=lr, momentum=momentum, betas=tuple(betas), eps=eps)
        super().__init__(params, dict(**defaults, bias_correction=True))

    def bind(
        self,
        fragments: list[ParamFragment],
        collect: Callable[[ParamFragment, Tensor], Tensor | None],
        spread: Callable[[ParamFragment, Tensor | None], Tensor],
    ) -> None:
        """Set the pieces of matrices that this process holds, and how matrices travel.

        `collect` takes this process's piece of a matrix, flat; it returns the matrix to the one
        process that orthogonalizes it, None to the others. `spread` takes what that process found,
        None from the others, and returns this process's piece of it. All processes call both, for
        the same matrices in the same order.
        """
        self._fragments: dict[Tensor, list[ParamFragment]] = {}
        for fragment in fragments:
            self._fragments.setdefault(fragment.flat, []).append(fragment)
        self._collect, self._spread = collect, spread

    @torch.no_grad()
    def step(self, closure=None):  # no caller passes a closure
        assert closure is None
        for group in self.param_groups:
            # ZeRO-3 steps one group at a time and leaves the others empty.
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["orthogonal"]:
                self._step_matrices(parameters, group)
            else:
                states = [self.state[parameter] for parameter in parameters]
                updates = compute_updates(parameters, states, group)
                torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _step_matrices(self, parameters: list[Tensor], group: dict) -> None:
        # All are collected first, so that the processes then work at the same time.
        matrices = [pair for p in parameters for pair in self._collect_matrices(p, group)]
        for number, (fragment, whole) in enumerate(matrices):
            if whole is not None:
                whole = orthogonalize(whole).mul_(SCALE * math.sqrt(max(whole.shape)))
                matrices[number] = fragment, whole
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for fragment, whole in matrices:
            piece = self._spread(fragment, whole)
            fragment.flat.view(-1)[fragment.in_flat].add_(piece, alpha=-group["lr"])

    def _collect_matrices(self, parameter: Tensor, group: dict) -> list[tuple]:
        """Update the momentum; returns the fragments and the matrices for this process."""
        state = self.state[parameter]
        gradient = parameter.grad
        momentum = group["momentum"]
        assert gradient is not None
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(state["exp_avg"], momentum).reshape(-1)
        return [
            (fragment, self._collect(fragment, ahead[fragment.in_flat]))
            for fragment in self._fragments[parameter]
        ]
