"""LAMB as ALBERT's release computes it (You et al. 2019; ALBERT paper, section 4.1).

    m  = b1 m + (1 - b1) g
    v  = b2 v + (1 - b2) g^2
    u  = m / (sqrt(v) + eps) + decay * w
    w -= lr * ratio * u          ratio = ||w|| / ||u||, or 1 if either norm is 0

There is no bias correction unless asked for; eps is added outside the root; biases and LayerNorm
parameters get neither decay nor ratio. The ratio belongs to a whole logical tensor. Under ZeRO or
tensor parallelism a process may hold only pieces of it, so the optimizer works on `ParamFragment`s:
it sums squares over those that it holds, and `reduce` adds the sums of the other processes. Sums of
squares are float64 (optim/norms.py), so the ratio does not depend on how a tensor is cut. Until
`bind` this is plain one-process LAMB. This file knows no ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from albert_ds.optim.norms import compute_norms

ENDLESS = 1e9  # a step count at which 1 - beta^t is 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamFragment:
    """Consecutive elements of a parameter (or its tensor-parallel shard), held in fp32 here.

    A rank has one of every parameter, in the same order as all ranks; it may hold no element.
    """

    name: str  # logical tensor
    group: int  # parameter group of the optimizer
    flat: Tensor  # fp32 flat parameter: master weights, and the key of the optimizer's state
    start: int  # first element in `flat`
    offset: int  # first element in the flattened local shard
    numel: int

    @property
    def in_flat(self) -> slice:
        """Its elements in `flat`."""
        return slice(self.start, self.start + self.numel)

    @property
    def in_shard(self) -> slice:
        """Its elements in the flattened local shard."""
        return slice(self.offset, self.offset + self.numel)


def decay_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices (decay and ratio); biases, LayerNorms, factors (neither)."""
    found: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in parameters:
        plain = name.endswith(("bias", ".scale", ".gain")) or "layer_norm" in name
        found[not plain].append(parameter)
    return [
        {
            "params": members,
            "weight_decay": weight_decay if adapt else 0.0,
            "adapt": adapt,
            "rate_share": 1.0,
        }
        for adapt, members in found.items()
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


class Lamb(torch.optim.Optimizer):
    """LAMB over flat parameters; one trust ratio per logical tensor.

    Args:
        params: the groups of `decay_groups`, or plain parameters, which all get a ratio.
        lr: learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, added to the update before its norm is computed.
        bias_correction: divide the moments by 1 - beta^t, as You et al. do; the release does not.
    """

    def __init__(
        self,
        params,
        lr: float = 0.00176,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = False,
    ):
        defaults = dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        super().__init__(params, dict(**defaults, bias_correction=bias_correction, adapt=True))
        whole = [
            ParamFragment(name=str(n), group=index, flat=p, start=0, offset=0, numel=p.numel())
            for index, group in enumerate(self.param_groups)
            for n, p in enumerate(group["params"])
        ]
        self.bind(whole)

    def disarm(self) -> None:
        """Make `step` do nothing until the next `bind`.

        Some DeepSpeed wrappers call `step` with zero gradients while they are built; because of
        weight decay that would be a full-size update.
        """
        self.armed = False

    def bind(
        self,
        fragments: list[ParamFragment],
        *,
        is_counted: Callable[[ParamFragment], bool] = lambda fragment: True,
        reduce: Callable[[Tensor], object] = lambda sums: None,
    ) -> None:
        """Set the fragments that this process holds, and the reduction over processes.

        `is_counted` is False of one that another process also holds, and counts. `reduce` sums a
        float64 tensor over all processes in place. Every process calls it once for each `step` of
        an adapted group, also if it holds no element.
        """
        self._reduce, self.armed = reduce, True
        numbers: list[dict[str, int]] = [{} for _ in self.param_groups]  # of the tensors by name
        self._held: dict[Tensor, list[ParamFragment]] = {f.flat: [] for f in fragments}
        for fragment in fragments:
            known = numbers[fragment.group]
            known.setdefault(fragment.name, len(known))
            if fragment.numel:
                self._held[fragment.flat].append(fragment)
        for group, known in zip(self.param_groups, numbers, strict=True):
            group["num_tensors"] = len(known)
        # Copied to the device once, so that no step waits for a copy.
        self._tensors, self._counted = {}, {}
        for flat, held in self._held.items():
            of_each = [numbers[f.group][f.name] for f in held]
            self._tensors[flat] = torch.tensor(of_each, device=flat.device)
            self._counted[flat] = torch.tensor([is_counted(f) for f in held], device=flat.device)

    @torch.no_grad()
    def step(self, closure=None):  # no caller passes a closure
        assert closure is None
        if not self.armed:
            return
        for group in self.param_groups:
            # ZeRO-3 steps one group at a time and leaves the others empty.
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self.state[parameter] for parameter in parameters]
            updates = compute_updates(parameters, states, group)
            if group["adapt"]:
                self._apply_adapted(parameters, updates, group)
            else:
                torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _apply_adapted(self, parameters: list[Tensor], updates: list[Tensor], group: dict) -> None:
        """w -= lr * ratio * u, with one ratio for each logical tensor."""
        sums = torch.zeros(2, group["num_tensors"], dtype=torch.float64, device=updates[0].device)
        for parameter, update in zip(parameters, updates, strict=True):
            if not self._held[parameter]:
                continue
            for row, tensor in zip(sums, (parameter, update), strict=True):
                norms = compute_norms(self._slices(parameter, tensor))
                squares = norms.square_() * self._counted[parameter]
                row.index_add_(0, self._tensors[parameter], squares)
        self._reduce(sums)
        weight, update = sums.sqrt_()
        ratio = torch.where((weight > 0) & (update > 0), weight / update, 1.0).float()
        for parameter, update in zip(parameters, updates, strict=True):
            if not self._held[parameter]:
                continue
            torch._foreach_addcmul_(
                self._slices(parameter, parameter),
                self._slices(parameter, update),
                ratio[self._tensors[parameter]].unbind(),
                value=-group["lr"],
            )

    def _slices(self, parameter: Tensor, tensor: Tensor) -> list[Tensor]:
        """Views of `tensor`, one for each fragment in `parameter`.

        Padding at the end of a flat partition is in no fragment: it is 0 and stays 0.
        """
        flat = tensor.view(-1)
        return [flat[fragment.in_flat] for fragment in self._held[parameter]]
