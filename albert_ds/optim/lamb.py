"""LAMB as ALBERT's release computes it (You et al. 2019; ALBERT paper, section 4.1).

    m  = b1 m + (1 - b1) g
    v  = b2 v + (1 - b2) g^2
    u  = m / (sqrt(v) + eps) + decay * w
    w -= lr * ratio * u          ratio = ||w|| / ||u||, or 1 where either norm is 0

No bias correction unless asked for; eps stands outside the root; biases and LayerNorm parameters
get neither decay nor ratio. The ratio belongs to a whole logical tensor. A layout (ZeRO, tensor
parallelism) may leave this process only pieces of it, so the optimizer thinks in `Segment`s: it
sums squares over the pieces it holds and lets `reduce` add what the other processes hold. Bound to
no layout it is plain one-process LAMB. This file knows no ranks; optim/zero.py knows no LAMB.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A run of elements of one logical tensor inside a flat parameter."""

    tensor: int  # which logical tensor of the parameter group
    start: int  # first element in the flat parameter
    numel: int
    counted: bool = True  # False where another process already adds this very piece to the norm


def decay_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices (decayed, adapted), then biases and LayerNorms (neither)."""
    matrices, vectors = [], []
    for name, parameter in parameters:
        plain = name.endswith("bias") or "layer_norm" in name
        (vectors if plain else matrices).append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay, "adapt": True},
        {"params": vectors, "weight_decay": 0.0, "adapt": False},
    ]


class Lamb(torch.optim.Optimizer):
    """LAMB over flat parameters; one trust ratio per logical tensor.

    Args:
        params: groups of `decay_groups`, or plain parameters (then all are adapted).
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, added to the update before its norm is taken.
        bias_correction: divide the moments by 1 - beta^t as You et al. do; the release does not.
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
        whole = {}
        for group in self.param_groups:
            group["num_tensors"] = len(group["params"])
            for tensor, parameter in enumerate(group["params"]):
                whole[parameter] = [Segment(tensor=tensor, start=0, numel=parameter.numel())]
        self.bind(whole, reduce=lambda sums: None)

    def disarm(self) -> None:
        """Make `step` do nothing until the next `bind`.

        Some DeepSpeed wrappers call `step` with zero gradients while they are being built; weight
        decay alone would make that a full-size update.
        """
        self.armed = False

    def bind(self, segments: dict[Tensor, list[Segment]], reduce: Callable[[Tensor], None]) -> None:
        """Tell which pieces each flat parameter holds, and how sums of squares are completed.

        `reduce` sums a float64 vector over all processes in place. It is called once for each
        `step` of an adapted group, on every process alike, whether or not it holds a piece.
        """
        self._segments, self._reduce, self.armed = segments, reduce, True
        # On the device once, so that no step waits for a copy from the host.
        self._tensor_of_segment = {
            parameter: torch.tensor([s.tensor for s in pieces], device=parameter.device)
            for parameter, pieces in segments.items()
        }
        self._counted = {
            parameter: torch.tensor([s.counted for s in pieces], device=parameter.device)
            for parameter, pieces in segments.items()
        }

    @torch.no_grad()
    def step(self, closure=None):  # returns no loss: none of our callers passes a closure
        assert closure is None
        if not self.armed:
            return
        for group in self.param_groups:
            # ZeRO-3 leaves the groups that are not being stepped empty.
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            updates = [self._update(p, group) for p in parameters]
            if group["adapt"]:
                self._adapt(parameters, updates, group["num_tensors"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _update(self, parameter: Tensor, group: dict) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        gradient = parameter.grad
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, root = state["exp_avg"], state["exp_avg_sq"].sqrt()
        if group["bias_correction"]:
            count = float(state["step"])
            first = first / (1 - beta1**count)
            root /= (1 - beta2**count) ** 0.5
        return (first / root.add_(group["eps"])).add_(parameter, alpha=group["weight_decay"])

    def _adapt(self, parameters: list[Tensor], updates: list[Tensor], num_tensors: int) -> None:
        """Scale every update by its logical tensor's ratio, in place."""
        sums = torch.zeros(2, num_tensors, dtype=torch.float64, device=parameters[0].device)
        for parameter, update in zip(parameters, updates, strict=True):
            if not self._segments[parameter]:
                continue
            for row, tensor in zip(sums, (parameter, update), strict=True):
                norms = torch.stack(torch._foreach_norm(self._slices(parameter, tensor)))
                squares = norms.double().square_() * self._counted[parameter]
                row.index_add_(0, self._tensor_of_segment[parameter], squares)
        self._reduce(sums)
        weight, update = sums.sqrt_()
        ratio = torch.where((weight > 0) & (update > 0), weight / update, 1.0).float()
        for parameter, update in zip(parameters, updates, strict=True):
            if not self._segments[parameter]:
                continue
            factors = ratio[self._tensor_of_segment[parameter]].unbind()
            torch._foreach_mul_(self._slices(parameter, update), factors)

    def _slices(self, parameter: Tensor, tensor: Tensor) -> list[Tensor]:
        """Views of `tensor`, one for each segment of `parameter`.

        Padding at the end of a flat partition lies in none of them: it is 0 and stays 0.
        """
        flat = tensor.view(-1)
        return [flat[s.start : s.start + s.numel] for s in self._segments[parameter]]
