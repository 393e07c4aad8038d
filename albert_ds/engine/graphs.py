"""A micro-batch's launches as one: CUDA graphs of the forward pass, the loss and the backward pass.

On text the host launches kernels more slowly than the device runs them, and a graph is one launch.
A graph repeats what it captured in the same memory, so what differs from one micro-batch to the
next lies on the device: ids, seeds of dropout, scales of the losses. Each shape of a micro-batch
(`data/fixed_shapes.py`) has a graph of its own, and so has each depth.
"""

import gc
import math
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from albert_ds.base.cli import log_line
from albert_ds.model import fused
from albert_ds.model.albert import AlbertForPretraining

MOST = 16  # graphs
PATIENCE = 400  # micro-batches without a graph, after which another may take its place
# Of the norm of all gradients: what a graph's may differ by from those of eager launches, which
# differ by as much as their sums have no fixed order.
TOLERANCE = 0.02
Key = tuple
Compute = Callable[..., dict[str, Tensor]]


@cache
def use_own_stream(device: torch.device) -> None:
    """Let all that follows run on a stream of its own: nothing is captured on the default one.

    Before the first forward pass: what adds to a parameter's gradient stays on that pass's stream,
    and a capture that reaches another stream fails.
    """
    torch.cuda.synchronize(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))


class GraphedForPretraining(AlbertForPretraining):
    """The model of a trainer, which runs it by `graphs` where there are any."""

    graphs: "Graphs | None" = None

    def forward(self, *, overflows: bool = False, **tensors):  # ty: ignore[incompatible-method-override]
        """`AlbertForPretraining.forward`; overflows: of a shape that does not come again."""
        if self.graphs is None or not self.training:
            return super().forward(**tensors)
        depth = len(self.albert.encoder.plan)
        return self.graphs.run(super().forward, tensors, depth=depth, overflows=overflows)


class Graphs:
    """The graphs of a model, and how many micro-batches ran without one."""

    def __init__(self, model: nn.Module):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.places = self._find_places()
        self.kept: dict[Key, Graph] = {}  # the last one used is the last
        self.pool: Any = None  # torch.cuda.MemPool: the memory that they share
        self.failure: str | None = None  # why nothing more is captured
        self.calls = self.eager = self.overflowed = 0
        self.sizes = [p.numel() + -p.numel() % 16 for p in self.parameters]
        # All graphs write their gradients here, side by side.
        self.flat = self.parameters[0].new_zeros(sum(self.sizes), requires_grad=False)

    def run(
        self, compute: Compute, tensors: dict, *, depth: int, overflows: bool
    ) -> dict[str, Tensor]:
        """What `compute` gives for the tensors, of which `loss` has a gradient."""
        self.calls += 1
        graph = None if overflows else self._find(compute, tensors, depth)
        if graph is not None:
            assert self.places == self._find_places(), "the weights have moved"
            graph.fill(tensors)
            graph.graph.replay()
            passes = graph.passes
        else:
            self.eager += 1
            self.overflowed += overflows
            if not self.kept:
                return compute(**tensors)
            with self._use_pool():
                passes = self.take_passes(compute, tensors)
        loss, values = HandOut.apply(passes, self, *self.parameters)
        return dict(zip(passes.names, values.unbind(), strict=True)) | {"loss": loss}

    def cut(self, flat: Tensor) -> list[Tensor]:
        """The gradient of each parameter in `flat`."""
        parts = zip(flat.split(self.sizes), self.parameters, strict=True)
        return [part[: p.numel()].view(p.shape) for part, p in parts]

    def take_passes(self, compute: Compute, tensors: dict) -> "Passes":
        """Forward and backward pass of a micro-batch; writes its gradients to `flat`."""
        outputs = compute(**tensors)
        loss = outputs.pop("loss")
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(self.cut(self.flat), gradients, strict=True)
        held = [(place, gradient) for place, gradient in pairs if gradient is not None]
        torch._foreach_copy_([place for place, _ in held], [gradient for _, gradient in held])
        return Passes(
            has_gradient=[gradient is not None for gradient in gradients],
            names=list(outputs),
            loss=loss.detach().clone(),
            values=torch.stack([x.detach().double() for x in outputs.values()]),
        )

    def take_counts(self) -> dict[str, int]:
        """Micro-batches since the last call that ran without a graph, and those that overflowed."""
        counts = {"eager_micro_batches": self.eager, "overflowed_micro_batches": self.overflowed}
        self.eager = self.overflowed = 0
        return counts

    @contextmanager
    def _use_pool(self):
        """Eager launches in the graphs' memory, which a run would otherwise need twice.

        The next graph writes over what outlives them. The pool is that of one thread.
        """
        with torch.cuda.use_mem_pool(self.pool), torch.autograd.set_multithreading_enabled(False):
            yield

    def _find_places(self) -> list[int]:
        return [p.data_ptr() for p in self.parameters]

    def _find(self, compute: Compute, tensors: dict, depth: int) -> "Graph | None":
        """The graph of this shape, captured if there is room for one more."""
        shapes = (tuple(x.shape) if isinstance(x, Tensor) else x for x in tensors.values())
        key = depth, *shapes
        graph = self.kept.pop(key, None)
        if graph is None:
            if self.failure is not None or not self._make_room():
                return None
            graph = self._capture(compute, tensors)
        if graph is not None:
            graph.used_at = self.calls
            self.kept[key] = graph
        return graph

    def _make_room(self) -> bool:
        """Whether one more may be kept; the one that has waited longest may go for it."""
        if len(self.kept) < MOST:
            return True
        oldest = next(iter(self.kept))
        if self.calls - self.kept[oldest].used_at <= PATIENCE:
            return False
        del self.kept[oldest]
        return True

    def _capture(self, compute: Compute, tensors: dict) -> "Graph | None":
        """A graph that gave the gradients of eager launches; None, and none from then on, else."""
        device = self.flat.device
        state = torch.cuda.get_rng_state(device)
        try:
            self.pool = self.pool or torch.cuda.MemPool()
            torch.cuda.empty_cache()  # as a capture does, which comes too late for the peak
            with self._use_pool():  # it also compiles and loads what a capture may not
                self.take_passes(compute, tensors)
            eager = self.flat.clone()
            torch.cuda.set_rng_state(state, device)
            graph = Graph(self, compute, tensors)
            graph.fill(tensors)
            graph.graph.replay()
            off, norm = (float(x.float().norm()) for x in (self.flat - eager, eager))
            if math.isfinite(norm) and not off <= TOLERANCE * norm:
                raise ArithmeticError(
                    f"gradients differ from eager ones by {off:.3g} of {norm:.3g}"
                )
        except Exception as error:  # of memory, of a driver: whatever it is, eager launches go on
            self.failure = "".join(traceback.format_exception(error))
            line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            log_line(f"no CUDA graphs from here on, kernels are launched one by one: {line}")
            graph = None
            if not self.kept:
                self.pool = None  # eager launches need that memory
            # Without graphs torch's operators launch faster.
            fused.MIN_TRITON_ELEMENTS = fused.DEFAULT_MIN_TRITON_ELEMENTS
        torch.cuda.set_rng_state(state, device)
        return graph


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What a micro-batch's forward and backward pass leave beside its gradients."""

    has_gradient: list[bool]  # of each parameter
    names: list[str]  # of the values
    loss: Tensor
    values: Tensor  # float64 [names], of the outputs but the loss


class Graph:
    """The launches of one shape."""

    used_at = 0  # micro-batches of the run

    def __init__(self, graphs: Graphs, compute: Compute, tensors: dict):
        self.inputs = {k: x.clone() if isinstance(x, Tensor) else x for k, x in tensors.items()}
        self.graph = torch.cuda.CUDAGraph()
        with (
            without_collection(),
            torch.cuda.graph(
                self.graph,
                pool=graphs.pool.id,
                stream=torch.cuda.current_stream(),
                capture_error_mode="thread_local",
            ),
        ):
            self.passes = graphs.take_passes(compute, self.inputs)

    def fill(self, tensors: dict) -> None:
        names = [name for name, x in tensors.items() if isinstance(x, Tensor)]
        into, given = ([held[name] for name in names] for held in (self.inputs, tensors))
        torch._foreach_copy_(into, given)


class HandOut(torch.autograd.Function):
    """A micro-batch's outputs, and in the backward pass the gradients that it has written.

    They are copies: a graph's own would change with the next micro-batch while the accumulated ones
    still lie in them. The gradient of the loss must be 1.
    """

    @staticmethod
    def forward(ctx, passes: Passes, graphs: Graphs, *parameters: Tensor):
        ctx.has_gradient = passes.has_gradient
        ctx.cut = graphs.cut
        ctx.gradients = graphs.flat.clone()
        values = passes.values.clone()
        ctx.mark_non_differentiable(values)
        return passes.loss.clone(), values

    @staticmethod
    @once_differentiable
    def backward(ctx, *_):
        gradients = zip(ctx.cut(ctx.gradients), ctx.has_gradient, strict=True)
        ctx.gradients = None  # a gradient that two hold would be copied
        return None, None, *(each if has else None for each, has in gradients)


@contextmanager
def without_collection():
    """No garbage collection within: it may free what a capture may not."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
