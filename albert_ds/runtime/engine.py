"""A model and DeepSpeed's JSON -> a DeepSpeed engine whose optimizer is exact.

One optimizer step costs one reduction of the unique parameters (a shared block is reduced once, not
once a layer) and, with ZeRO, one gather of the updated weights; LAMB adds one all-reduce of a small
vector.
"""

from dataclasses import dataclass

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from albert_ds.errors import UserError
from albert_ds.optim.lamb import Lamb, decay_groups
from albert_ds.optim.zero import Piece, bind_lamb, init_states, read_layout
from albert_ds.parallel.mesh import Mesh
from albert_ds.parallel.tensor import shard_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """DeepSpeed's engine with what this trainer must know of its inside."""

    deepspeed: deepspeed.DeepSpeedEngine
    optimizer: torch.optim.Optimizer  # the one inside DeepSpeed's wrapper
    pieces: list[Piece]  # where this rank's fp32 masters and moments lie
    shard_dims: dict[str, int | None]  # logical tensor -> dimension cut by tensor parallelism
    shapes: dict[str, torch.Size]  # logical tensor -> its whole shape
    mesh: Mesh

    @property
    def stage(self) -> int:
        return self.deepspeed.zero_optimization_stage()

    def is_counted(self, piece: Piece) -> bool:
        """False where another rank holds this very piece too and counts it in sums over ranks."""
        if self.stage == 0 and self.mesh.dp_rank > 0:
            return False
        return self.shard_dims[piece.name] is not None or self.mesh.tp_rank == 0

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def build_engine(model: nn.Module, mesh: Mesh, ds_config: dict) -> Engine:
    """Wrap `model` (on its device, already cut for tensor parallelism). Collective."""
    if ds_config.get("fp16", {}).get("enabled") and not get_accelerator().is_fp16_supported():
        raise UserError(
            "--deepspeed_config: fp16 is not supported by this device; use bf16 or fp32"
        )
    shard_dims = {name: shard_dim(p) for name, p in model.named_parameters()}
    shapes = {name: _whole_shape(p, mesh) for name, p in model.named_parameters()}
    block = ds_config["optimizer"]
    params = {k: v for k, v in block["params"].items() if k != "weight_decay"}
    groups = decay_groups(model.named_parameters(), block["params"].get("weight_decay", 0.01))
    name_of = {id(p): name for name, p in model.named_parameters()}
    tensor_names = [[name_of[id(p)] for p in group["params"]] for group in groups]
    assert sum(map(len, tensor_names)) == len(name_of), "a parameter is in no group"
    optimizer = _build_optimizer(block["type"], groups, params)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=_complete(ds_config, sum(p.numel() for p in model.parameters())),
        mpu=mesh,
        dist_init_required=False,
    )
    built = Engine(
        deepspeed=engine,
        optimizer=optimizer,
        pieces=read_layout(engine),
        shard_dims=shard_dims,
        shapes=shapes,
        mesh=mesh,
    )
    init_states(optimizer, built.pieces)
    if isinstance(optimizer, Lamb):
        bind_lamb(
            optimizer,
            built.pieces,
            tensor_names=tensor_names,
            is_counted=built.is_counted,
            reduce=dist.all_reduce,
        )
    return built


def _build_optimizer(kind: str, groups: list[dict], params: dict) -> torch.optim.Optimizer:
    if kind == "Lamb":
        optimizer = Lamb(groups, **params)
        optimizer.disarm()
        return optimizer
    if kind == "FusedLamb":
        from deepspeed.ops.lamb import FusedLamb  # compiles a CUDA extension

        return FusedLamb(groups, **params)
    return torch.optim.AdamW(groups, **params, fused=True)


def _whole_shape(parameter: nn.Parameter, mesh: Mesh) -> torch.Size:
    shape, dim = list(parameter.shape), shard_dim(parameter)
    if dim is not None:
        shape[dim] *= mesh.tp_size
    return torch.Size(shape)


def _complete(ds_config: dict, num_parameters: int) -> dict:
    """What DeepSpeed is given: the user's JSON without the optimizer, which we hand over built."""
    config = {key: value for key, value in ds_config.items() if key != "optimizer"}
    config["zero_allow_untested_optimizer"] = True
    config.setdefault("steps_per_print", 10**12)
    if config.get("bf16", {}).get("enabled"):
        # Else ZeRO-2 and 3 would write a NaN gradient into the weights instead of skipping it.
        config["bf16"] = {"check_grad_overflow": True, **config["bf16"]}
    zero = dict(config.get("zero_optimization", {}))
    if zero.get("stage", 0) > 0:
        # One bucket for the whole model: one reduction a step. The default allocates 5e8 elements.
        for key in ("reduce_bucket_size", "allgather_bucket_size"):
            if zero.get(key, "auto") == "auto":
                zero[key] = num_parameters + num_parameters % 2
    if zero.get("stage", 0) == 3:
        # DeepSpeed's own linear rounds before it adds the bias: gradients 1 % off in bf16.
        zero.setdefault("memory_efficient_linear", False)
        # Parameters this few are cheaper to gather together than to keep apart.
        zero.setdefault("stage3_param_persistence_threshold", 0)
    config["zero_optimization"] = zero
    return config


def take_step(engine: Engine) -> tuple[float, bool]:
    """Reduce, clip and update after the last micro-batch of a step.

    Returns the gradient norm before clipping, and whether the update was applied: a gradient that
    is not finite skips it, on all ranks alike.
    """
    if engine.stage > 0:
        engine.deepspeed.step()
        norm = engine.deepspeed.get_global_grad_norm()
        assert norm is not None, "zero_optimization.compute_grad_norm is off"
        return float(norm), engine.deepspeed.was_step_applied()
    norm = float(_gradient_norm(engine))
    applied = norm < float("inf")  # False for NaN too
    if applied:
        engine.deepspeed.step()
    else:
        # DeepSpeed would scale by NaN and write the result into the weights.
        engine.deepspeed.zero_grad()
        engine.deepspeed.micro_steps += 1
    return norm, applied


def _gradient_norm(engine: Engine) -> Tensor:
    """Global norm at ZeRO-0, where every data-parallel rank has the reduced gradient."""
    mesh = engine.mesh
    squares = [
        p.grad.double().square().sum()
        for name, p in engine.deepspeed.module.named_parameters()
        if p.grad is not None and (engine.shard_dims[name] is not None or mesh.tp_rank == 0)
    ]
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=mesh.tp_group)
    return total.sqrt()
