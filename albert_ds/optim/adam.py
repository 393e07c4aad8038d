"""The moments and the update of Adam, which other optimizers go on with; and AdamW itself."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

NamedParameters = Iterable[tuple[str, nn.Parameter]]
WEIGHT_DECAY = 0.01  # where DeepSpeed's JSON says none
MOMENTS = ("exp_avg", "exp_avg_sq")  # names of the states, and of files in a checkpoint
ENDLESS = 1e9  # a step count at which 1 - beta^t is 1


def build_adamw(
    parameters: NamedParameters, *, weight_decay: float = WEIGHT_DECAY, **params
) -> torch.optim.AdamW:
    """torch's, of all parameters."""
    return torch.optim.AdamW(decay_groups(parameters, weight_decay), **params, fused=True)


def decay_groups(parameters: NamedParameters, weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices (decay and ratio); biases, LayerNorms, factors (neither)."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in parameters:
        plain = name.endswith(("bias", ".scale", ".gain")) or "layer_norm" in name
        groups[not plain].append(parameter)
    return [
        {
            "params": members,
            "weight_decay": weight_decay if adapt else 0.0,
            "adapt": adapt,
            "rate_share": 1.0,
        }
        for adapt, members in groups.items()
    ]


def update_plainly(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[float],
    group: dict,
) -> list[Tensor]:
    """Update the moments and return each u, an operation at a time.

    torch's fused Adam takes 1 - beta2 of an fp32 beta2 on CUDA, which is off by 1.3e-5 at 0.999.
    """
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    roots = torch._foreach_sqrt(second)
    torch._foreach_mul_(roots, [(1 - beta2**t) ** -0.5 for t in steps])
    torch._foreach_add_(roots, group["eps"])
    updates = torch._foreach_div(first, roots)
    torch._foreach_div_(updates, [1 - beta1**t for t in steps])
    torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
    return list(updates)


def compute_updates(parameters: list[Tensor], states: list[dict], group: dict) -> list[Tensor]:
    """Update the moments in `states`; returns each parameter's u. `w -= lr * u` is AdamW."""
    for parameter, state in zip(parameters, states, strict=True):
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
    gradients = [p.grad.contiguous() for p in parameters if p.grad is not None]
    first, second = ([state[m] for state in states] for m in ("exp_avg", "exp_avg_sq"))
    steps = [float(s["step"]) if group["bias_correction"] else ENDLESS for s in states]
    if parameters[0].is_cuda:
        return update_plainly(parameters, gradients, first, second, steps, group)
    # torch's fused Adam reads and writes everything once. Starting from decay * w with a rate
    # of -1 it leaves u; with a very large step count it corrects no bias.
    updates = list(torch._foreach_mul(parameters, group["weight_decay"]))
    torch._fused_adam_(
        updates,
        gradients,
        first,
        second,
        [],
        [p.new_full((), t, dtype=torch.float32) for p, t in zip(parameters, steps, strict=True)],
        lr=-1.0,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    return updates
