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

from collections.abc import Callable

import torch
from torch import Tensor

from albert_ds.optim.adam import WEIGHT_DECAY, NamedParameters, compute_updates, decay_groups
from albert_ds.optim.fragments import ParamFragment
from albert_ds.optim.norms import compute_norms


def build_lamb(
    parameters: NamedParameters, *, weight_decay: float = WEIGHT_DECAY, **params
) -> "Lamb":
    """LAMB of all parameters, which does nothing until it is bound."""
    optimizer = Lamb(decay_groups(parameters, weight_decay), **params)
    optimizer.disarm()
    return optimizer


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
        self._reduce = reduce
        self.armed = True
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
