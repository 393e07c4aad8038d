"""Build a DeepSpeed engine whose optimizer is exact in every layout, and take its steps.

One optimizer step reduces the unique parameters once (a shared block once, not once per layer) and,
with ZeRO, gathers the updated weights once; LAMB adds one all-reduce of a small vector.
"""

import sys
from collections.abc import Container
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from types import ModuleType

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from torch import Tensor, nn

from albert_ds.base.errors import UserError
from albert_ds.engine.deepspeed_config import precision_of
from albert_ds.engine.optimizers import OPTIMIZERS, Kind
from albert_ds.model.encoder import SelfAttention
from albert_ds.optim.fragments import ParamFragment
from albert_ds.optim.norms import compute_norms
from albert_ds.optim.zero import (
    fill_masters,
    freeze_fragments,
    init_states,
    read_layout,
    use_exact_norms,
)
from albert_ds.parallel.mesh import Mesh, shard, shard_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """DeepSpeed's engine, and where it keeps the fp32 weights and moments."""

    deepspeed: deepspeed.DeepSpeedEngine
    optimizer: torch.optim.Optimizer  # the one inside DeepSpeed's wrapper
    kind: Kind  # its row
    fragments: list[ParamFragment]  # this rank's fp32 master weights and moments
    shard_dims: dict[str, int | None]  # logical tensor -> dimension cut by tensor parallelism
    shapes: dict[str, torch.Size]  # logical tensor -> shape before it is cut
    mesh: Mesh
    max_norm: float  # gradients are clipped to this norm; 0: never
    average: float | None  # decay of the average of the weights, if there is one

    @property
    def stage(self) -> int:
        return self.deepspeed.zero_optimization_stage()

    def is_counted(self, fragment: ParamFragment) -> bool:
        """False where another rank holds the same fragment and counts it in sums over ranks."""
        if self.stage == 0 and self.mesh.dp_rank > 0:
            return False
        return self.shard_dims[fragment.name] is not None or self.mesh.tp_rank == 0

    def collect(self, fragment: ParamFragment, piece: Tensor, rank: int) -> Tensor | None:
        """On `rank` the whole logical tensor of `fragment`, None on others. Collective.

        Every rank passes its piece of the tensor, flat; all bits arrive.
        """
        whole = piece.new_zeros(self.shapes[fragment.name], dtype=torch.int32)
        if self.is_counted(fragment):
            part = shard(whole, self.shard_dims[fragment.name], self.mesh)
            flat = whole.new_zeros(part.numel())
            flat[fragment.in_shard] = piece.view(torch.int32)
            part.copy_(flat.view(part.shape))
        # The bits are summed as integers: adding zeros then keeps even the sign of a zero.
        dist.reduce(whole, dst=rank)
        return whole.view(torch.float32) if self.mesh.rank == rank else None

    def spread(self, fragment: ParamFragment, whole: Tensor | None, rank: int) -> Tensor:
        """This rank's piece, flat, of the tensor that `rank` has found. Collective."""
        if whole is None:
            whole = fragment.flat.new_empty(self.shapes[fragment.name])
        whole = whole.contiguous()
        dist.broadcast(whole, src=rank)
        return self.cut(fragment, whole)

    def cut(self, fragment: ParamFragment, whole: Tensor) -> Tensor:
        """This rank's piece, flat, of the logical tensor of `fragment`."""
        part = shard(whole, self.shard_dims[fragment.name], self.mesh)
        return part.reshape(-1)[fragment.in_shard]

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["rate_share"]

    def set_update_count(self, updates: int) -> None:
        """Set the number of updates that the moments contain."""
        for flat in {fragment.flat for fragment in self.fragments}:
            self.optimizer.state[flat]["step"] = self.kind.count(updates, flat)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the gradients of a micro-batch; with the last one of a step they are complete.

        DeepSpeed would count to the accumulation of its JSON, wrongly once the batch has changed.
        It divides by that too, without being asked, where the loss itself is what a model returned:
        a view is not.
        """
        self.deepspeed.set_gradient_accumulation_boundary(is_last)
        self.deepspeed.backward(loss.view_as(loss), scale_wrt_gas=False)

    def update_average(self, updates: int) -> None:
        """Take the weights after `updates` updates into their bias-corrected EMA, if any."""
        if self.average is None:
            return
        share = (1 - self.average) / (1 - self.average**updates)
        for flat in {fragment.flat for fragment in self.fragments}:
            self.optimizer.state[flat]["average"].lerp_(flat.detach(), share)

    def clear_gradients(self) -> None:
        """Forget the last step's, which ZeRO-3 takes again where this step gives none."""
        if self.stage == 3:
            wrapper = self.deepspeed.optimizer
            assert wrapper is not None
            wrapper.grad_partitions_flat_buffer.zero_()

    def take_step(self, idle: Container[str] = ()) -> tuple[float, bool]:
        """Reduce, clip and update after the last micro-batch of a step. Collective.

        `idle` are the logical tensors that this step leaves as they are, with their moments.
        Returns the gradient norm before clipping, and whether the update was applied: a gradient
        that is not finite skips it, on all ranks alike.
        """
        with freeze_fragments(self.optimizer, [f for f in self.fragments if f.name in idle]):
            if self.stage > 0:
                self.deepspeed.step()
                norm = self.deepspeed.get_global_grad_norm()
                assert norm is not None, "zero_optimization.compute_grad_norm is off"
                return float(norm), self.deepspeed.was_step_applied()
            # DeepSpeed clips by an fp32 norm here, and would write a non-finite gradient.
            norm = self._clip_gradients()
            applied = norm < float("inf")  # False for NaN too
            if applied:
                self.deepspeed.step()
            else:
                self.deepspeed.zero_grad()
            return norm, applied

    def _clip_gradients(self) -> float:
        """Clip at ZeRO-0, where every rank has the reduced gradients; returns their norm."""
        named = self.deepspeed.module.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        sharded = [self.shard_dims[name] is not None for name in gradients]
        counted = torch.tensor(sharded, device=self.deepspeed.device) | (self.mesh.tp_rank == 0)
        total = (compute_norms(list(gradients.values())).square_() * counted).sum()
        dist.all_reduce(total, group=self.mesh.tp_group)
        norm = float(total.sqrt())
        scale = self.max_norm / (norm + 1e-6)
        if 0 < scale < 1:  # 0: no clipping, or an infinite norm
            torch._foreach_mul_(list(gradients.values()), scale)
        return norm


def avoid_importing_dynamo() -> None:
    """Nothing here is compiled, and torch's compiler takes seconds to import.

    torch's optimizers import it to keep their own methods out of it, DeepSpeed's first backward
    pass for a Muon of its own, which no optimizer here is.
    """
    for method in vars(torch.optim.Optimizer).values():
        if plain := getattr(method, "__wrapped__", None):
            plain.__dynamo_disable = plain
    for module, name in (("muon_optimizer", "MuonWithAuxAdam"), ("original_muon", "muon_update")):
        stand_in = ModuleType(f"deepspeed.runtime.zero.muon.{module}")
        setattr(stand_in, name, type(name, (), {}))
        sys.modules.setdefault(stand_in.__name__, stand_in)


def build_engine(
    model: nn.Module, mesh: Mesh, ds_config: dict, *, average: float | None = None
) -> Engine:
    """Wrap `model`: fp32, on its device, already cut for tensor parallelism. Collective.

    `average` is the decay of the average of the weights.

    In 16 bits the fp32 master weights start from the model's fp32 weights, and the 16-bit weights
    are their roundings. Raises UserError for heads or an optimizer that the device cannot run.
    """
    avoid_importing_dynamo()
    shard_dims = {name: shard_dim(p) for name, p in model.named_parameters()}
    shapes = {name: _whole_shape(p, mesh) for name, p in model.named_parameters()}
    block = ds_config["optimizer"]
    kind = OPTIMIZERS[block["type"]]
    optimizer = kind.build(model.named_parameters(), **block["params"])
    num_grouped = sum(len(group["params"]) for group in optimizer.param_groups)
    assert num_grouped == len(shapes), "a parameter is in no group"
    is_half = precision_of(ds_config) != "fp32"
    if is_half:
        check_head_width(model)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()} if is_half else {}
    config = _complete(ds_config, sum(p.numel() for p in model.parameters()))
    with redirect_stdout(StringIO()):  # its bf16 form prints 18 lines about memory
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, mpu=mesh, dist_init_required=False
        )
    built = Engine(
        deepspeed=engine,
        optimizer=optimizer,
        kind=kind,
        fragments=read_layout(engine),
        shard_dims=shard_dims,
        shapes=shapes,
        mesh=mesh,
        max_norm=ds_config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT) or 0.0,
        average=average,
    )
    if is_half:
        fill_masters(built.fragments, masters)
    if engine.fp16_enabled():
        # At its least scale DeepSpeed would raise; a step that is skipped is counted instead.
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False  # ty: ignore
    use_exact_norms(engine.optimizer)
    init_states(optimizer, built.fragments, kind.moments, has_average=average is not None)
    built.set_update_count(0)
    if kind.bind is not None:
        kind.bind(built)
    return built


def check_head_width(model: nn.Module, name: str = "") -> None:
    """Raise UserError where the CUDA kernel of 16-bit attention does not take the heads' width.

    name: begins the line, of another model than the run's.
    """
    for module in model.modules():
        if isinstance(module, SelfAttention) and module.query.weight.is_cuda:
            width = module.head_dim
            if width % 8 or width > 256:
                raise UserError(
                    f"{name}--hidden-size over --num-heads is {width}: in 16 bits on CUDA it must "
                    "be a multiple of 8, at most 256; allowed: other heads, or fp32"
                )


def _whole_shape(parameter: nn.Parameter, mesh: Mesh) -> torch.Size:
    shape = list(parameter.shape)
    dim = shard_dim(parameter)
    if dim is not None:
        shape[dim] *= mesh.tp_size
    return torch.Size(shape)


def _complete(ds_config: dict, num_parameters: int) -> dict:
    """DeepSpeed's configuration: the user's JSON without what is ours, and our defaults."""
    config = {key: value for key, value in ds_config.items() if key not in ("optimizer", "fp8")}
    config["zero_allow_untested_optimizer"] = True
    config.setdefault("steps_per_print", 10**12)
    # DeepSpeed's timer waits for the device twice a micro-batch.
    config["timers"] = {"throughput": {"enabled": False}}
    if precision_of(config) == "bf16":
        # Without it ZeRO-2 and 3 write a NaN gradient into the weights instead of skipping it.
        config["bf16"] = {"check_grad_overflow": True, **config["bf16"]}
        # At ZeRO-1 each gradient joins its fp32 sum as it appears, and none is kept or zeroed.
        config["bf16"].setdefault("immediate_grad_update", True)
    zero = dict(config.get("zero_optimization", {}))
    if zero.get("stage", 0) > 0:
        # One bucket for the whole model: one reduction per step. The default is 5e8 elements.
        for key in ("reduce_bucket_size", "allgather_bucket_size"):
            if zero.get(key, "auto") == "auto":
                zero[key] = num_parameters + num_parameters % 2
    if zero.get("stage", 0) == 3:
        # DeepSpeed's own linear rounds before it adds the bias: bf16 gradients are 1 % off.
        zero.setdefault("memory_efficient_linear", False)
        # With so few parameters, gathering all together is cheaper than keeping some.
        zero.setdefault("stage3_param_persistence_threshold", 0)
    if zero.get("stage", 0) == 0:
        config["gradient_clipping"] = 0.0  # `Engine.take_step` clips; the default is 1.0
    config["zero_optimization"] = zero
    return config
