"""Read and check DeepSpeed's JSON.

The JSON sets ZeRO, precision, clipping, communication and the optimizer; the command line sets
batch, steps and schedule. "auto" takes the command line's value. Two different values for the same
setting are refused, and so is every setting that DeepSpeed 0.19 accepts and computes wrongly.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from albert_ds.base.cli import Range, integer, positive
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import check, read_json
from albert_ds.model.config import ModelConfig

AUTO_COUNT = ("auto", positive)
COUNT = integer(1, 1 << 31)
SIZE, LIMIT = integer(1, 1 << 40), integer(0, 1 << 40)  # in elements
PRECISION = ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16")
# Every key that is allowed, with its values; all may be absent.
SCHEMA: dict[str, Any] = {
    "optimizer": dict,
    "zero_optimization": {
        "stage": (0, 1, 2, 3),
        "reduce_bucket_size": ("auto", SIZE),
        "allgather_bucket_size": ("auto", SIZE),
        "allgather_partitions": bool,
        "overlap_comm": bool,
        "contiguous_gradients": bool,
        "reduce_scatter": bool,
        "sub_group_size": SIZE,
        "use_multi_rank_bucket_allreduce": bool,
        "compute_grad_norm": bool,
        "stage3_prefetch_bucket_size": LIMIT,
        "stage3_max_live_parameters": LIMIT,
        "stage3_max_reuse_distance": LIMIT,
        "stage3_param_persistence_threshold": LIMIT,
        "memory_efficient_linear": bool,
    },
    "bf16": {"enabled": bool, "check_grad_overflow": bool, "immediate_grad_update": bool},
    "fp8": {"enabled": bool},  # ours: the blocks' products, beside bf16 (model/fp8.py)
    "fp16": {
        "enabled": bool,
        "loss_scale": Range(ge=0, le=2.0**64),
        "initial_scale_power": integer(0, 64),
        "loss_scale_window": COUNT,
        "hysteresis": COUNT,
        "consecutive_hysteresis": bool,
        "min_loss_scale": Range(gt=0, le=2.0**64),
    },
    "data_types": {"grad_accum_dtype": PRECISION},
    "communication_data_type": PRECISION,
    "gradient_clipping": Range(ge=0, le=1e30),
    "train_batch_size": AUTO_COUNT,
    "train_micro_batch_size_per_gpu": AUTO_COUNT,
    "gradient_accumulation_steps": AUTO_COUNT,
    "prescale_gradients": bool,
    "gradient_predivide_factor": Range(gt=0, le=1e30),
    "wall_clock_breakdown": bool,
    "steps_per_print": positive,
}
LEAST_WIDTH = 2048  # of products in eight bits
# Of the JSON or of its zero_optimization: what DeepSpeed accepts and which breaks the update or the
# checkpoint, and what is stated elsewhere.
REFUSED = {
    "round_robin_gradients": "it scrambles the map from parameters to master weights",
    "stage3_module_granularity_threshold": "it crashes on a parameter held by the root module",
    "offload_optimizer": "the state of sharing models is small; offloading is not supported",
    "offload_param": "the parameters of sharing models are few; offloading is not supported",
    "zero_quantized_weights": "quantised weights are not exact",
    "zero_quantized_gradients": "quantised gradients are not exact",
    "zero_hpz_partition_size": "a secondary partition is not supported",
    "memory_efficient_linear": "it rounds in bf16 before it adds the bias: gradients 1 % off",
    "scheduler": "the schedule belongs to the command line (--learning-rate, --warmup-steps)",
    "tensor_parallel": "use --tensor-parallel; DeepSpeed's own would replace the groups",
    "checkpoint": "checkpoints are layout-free files of this trainer",
    "activation_checkpointing": "use --activation-checkpointing; reentrant checkpointing of a "
    "shared block fails from ZeRO-2 on",
}
# Of zero_optimization or of bf16: what may not be switched off.
NEEDED = {
    "compute_grad_norm": "without the norm a gradient that is not finite would be applied",
    "check_grad_overflow": "ZeRO-2 and 3 would apply a gradient that is not finite",
}
BROKEN_AT_STAGE_0 = {
    "fp16": "divides the gradients by a loss scale that was never applied",
    "bf16": "takes a hidden optimizer step at start and misses shards in the gradient norm",
}


def precision_of(config: dict) -> str:
    """The type that a JSON's model computes in: bf16, fp16 or fp32."""
    halves = (kind for kind in ("bf16", "fp16") if config.get(kind, {}).get("enabled"))
    return next(halves, "fp32")


def count_reductions(stage: int, accumulation: int) -> int:
    """How often a ZeRO stage reduces the gradients in a step of `accumulation` micro-batches."""
    return accumulation if stage >= 2 else 1


def has_eight_bits(config: dict) -> bool:
    """Whether the products of the blocks are in eight bits."""
    return config.get("fp8", {}).get("enabled", False)


def read_ds_config(path: Path) -> dict:
    """Read and check DeepSpeed's JSON; UserError names file, key, value and what is allowed."""
    name = f"--deepspeed_config {path}"
    if not path.exists():
        raise UserError(f"{name}: no such file; `albert-ds recipes --output .` writes ds_configs/")
    config = read_json(path, name)
    zero = config.get("zero_optimization")
    for key, reason in REFUSED.items():
        if key in config or (isinstance(zero, dict) and zero.get(key)):
            raise UserError(f"{name}: {key} is refused: {reason}")
    check(config, SCHEMA, name, is_closed=True)
    zero = config.get("zero_optimization", {})
    for key, reason in NEEDED.items():
        if (zero | config.get("bf16", {})).get(key) is False:
            raise UserError(f"{name}: {key} false is refused: {reason}")
    bucket = zero.get("allgather_bucket_size")
    if isinstance(bucket, int) and bucket % 2:
        raise UserError(
            f"{name}: zero_optimization.allgather_bucket_size {bucket}: must be even, for NCCL's "
            "alignment"
        )
    from albert_ds.engine.optimizers import OPTIMIZERS  # only here, since torch is slow to import

    block = config.get("optimizer", {})
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in OPTIMIZERS:
        raise UserError(
            f'{name}: "optimizer" needs "type", one of {", ".join(OPTIMIZERS)}; found {kind!r}'
        )
    allowed = {"optimizer": {"type": kind, "params": OPTIMIZERS[kind].params}}
    check({"optimizer": block}, allowed, name, is_closed=True)
    half = [kind for kind in BROKEN_AT_STAGE_0 if config.get(kind, {}).get("enabled")]
    if len(half) == 2:
        raise UserError(f"{name}: bf16 and fp16 are both enabled; choose one")
    if has_eight_bits(config) and precision_of(config) != "bf16":
        raise UserError(
            f"{name}: fp8 with {precision_of(config)} is refused: all but the blocks' products "
            "is in bf16; allowed: bf16.enabled true"
        )
    if half and not zero.get("stage"):
        raise UserError(
            f"{name}: {half[0]} with ZeRO stage 0 is refused: DeepSpeed's "
            f"wrapper for it {BROKEN_AT_STAGE_0[half[0]]}; stage 1 costs the same traffic"
        )
    return config


def check_device(path: Path, config: dict, *, tensor_parallel: int) -> None:
    """Raise UserError if this device or layout cannot run what the resolved JSON asks for."""
    if precision_of(config) == "fp16":
        from deepspeed.accelerator import get_accelerator  # only here, since it is slow to import

        if not get_accelerator().is_fp16_supported():
            raise UserError(
                f"--deepspeed_config {path}: fp16.enabled true: this device does not support it; "
                "use bf16 or fp32"
            )
    from albert_ds.engine.optimizers import OPTIMIZERS  # only here, since torch is slow to import

    reason = OPTIMIZERS[config["optimizer"]["type"]].refuse(config, tensor_parallel)
    if reason is not None:
        raise UserError(f"--deepspeed_config {path}: {reason}")


def check_eight_bits(path: Path, config: dict, model: ModelConfig, *, tensor_parallel: int) -> None:
    """Raise UserError if the JSON asks for fp8 and model, layout or device cannot run it."""
    if not has_eight_bits(config):
        return
    import torch  # only here, since it is slow to import

    what = refuse_eight_bits(model, tensor_parallel=tensor_parallel)
    if what is None:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
            what = (
                "this device: its products take no eight bits; allowed: an H100, H200 or later GPU"
            )
        elif find_spec("triton") is None:
            what = "no Triton, whose kernels cast to eight bits; allowed: a torch that brings it"
    if what is not None:
        raise UserError(f"--deepspeed_config {path}: fp8.enabled true is refused with {what}")


def refuse_eight_bits(model: ModelConfig, *, tensor_parallel: int) -> str | None:
    """Why fp8 is refused on every device, and what is allowed; None if it is not."""
    sizes = {"--hidden-size": model.hidden_size, "--ffn-size": model.ffn_size}
    odd = [f"{flag} {size}" for flag, size in sizes.items() if size < LEAST_WIDTH or size % 16]
    if odd:
        return (
            f"{odd[0]}: the casts take what narrow products gain; allowed: multiples of 16 from "
            f"{LEAST_WIDTH} on"
        )
    if model.per_layer != "none":
        return f"--per-layer {model.per_layer}: such blocks run in bf16 alone; allowed: none"
    if tensor_parallel > 1:
        return f"--tensor-parallel {tensor_parallel}: blocks in parts run in bf16 alone; allowed: 1"
    return None


def resolve_ds_config(
    config: dict,
    *,
    batch_size: int,
    micro_batch_size: int,
    accumulation: int,
    learning_rate: float | None,
    default_learning_rate: float,
) -> dict:
    """Put the command line's values where the JSON has "auto" or nothing; refuse other values."""
    resolved = json.loads(json.dumps(config))
    owned = {
        "train_batch_size": ("--batch-size", batch_size),
        "train_micro_batch_size_per_gpu": ("--micro-batch-size", micro_batch_size),
        "gradient_accumulation_steps": ("batch size / (micro-batch size x ranks)", accumulation),
    }
    for key, (flag, value) in owned.items():
        _take(resolved, key, flag, value)
    params = resolved["optimizer"].setdefault("params", {})
    if params.get("lr", "auto") == "auto":
        params["lr"] = default_learning_rate if learning_rate is None else learning_rate
    elif learning_rate is not None:
        _take(params, "lr", "--learning-rate", learning_rate)
    return resolved


def _take(block: dict, key: str, flag: str, value) -> None:
    number = block.get(key, "auto")
    if number not in ("auto", value):
        raise UserError(
            f'--deepspeed_config has "{key}": {number}, but {flag} is {value}; '
            'allowed: the same number, or "auto"'
        )
    block[key] = value
