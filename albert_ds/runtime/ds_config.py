"""DeepSpeed's JSON: who owns which number, and what would be silently wrong.

The JSON owns ZeRO, precision, clipping, communication and the optimizer block; the command line
owns batch, steps and schedule. "auto" takes the command line's value; a number in both places that
differs is refused, and so is every setting that DeepSpeed 0.19 accepts and then gets wrong.
"""

import json
from pathlib import Path

from albert_ds.errors import UserError

KNOWN_KEYS = {
    "optimizer",
    "zero_optimization",
    "bf16",
    "fp16",
    "data_types",
    "communication_data_type",
    "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "prescale_gradients",
    "gradient_predivide_factor",
    "wall_clock_breakdown",
    "steps_per_print",
}
NESTED_KEYS = {
    "zero_optimization": {
        *("stage", "reduce_bucket_size", "allgather_bucket_size", "allgather_partitions"),
        *("overlap_comm", "contiguous_gradients", "reduce_scatter", "sub_group_size"),
        *("use_multi_rank_bucket_allreduce", "compute_grad_norm", "stage3_prefetch_bucket_size"),
        *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
        *("stage3_param_persistence_threshold", "memory_efficient_linear"),
    },
    "bf16": {"enabled", "check_grad_overflow", "immediate_grad_update"},
    "fp16": {
        *("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
        *("consecutive_hysteresis", "min_loss_scale"),
    },
    "data_types": {"grad_accum_dtype"},
}
OPTIMIZERS = {
    "Lamb": {"lr", "betas", "eps", "weight_decay", "bias_correction"},
    "AdamW": {"lr", "betas", "eps", "weight_decay"},
    # DeepSpeed's CUDA kernel, by its own rules (docs/lamb.md).
    "FusedLamb": {
        *("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff")
    },
}
# Settings that DeepSpeed takes without a word and that then break the update or the checkpoint.
BROKEN_ZERO_SETTINGS = {
    "round_robin_gradients": "it scrambles the map from parameters to master weights",
    "stage3_module_granularity_threshold": "it crashes on a parameter held by the root module",
    "offload_optimizer": "the state of sharing models is small; offloading is not supported",
    "offload_param": "the parameters of sharing models are few; offloading is not supported",
    "zero_quantized_weights": "quantised weights are not exact",
    "zero_quantized_gradients": "quantised gradients are not exact",
    "zero_hpz_partition_size": "a secondary partition is not supported",
    "memory_efficient_linear": "it rounds in bf16 before it adds the bias: gradients 1 % off",
}
STATED_ELSEWHERE = {
    "scheduler": "the schedule belongs to the command line (--learning-rate, --warmup-steps)",
    "tensor_parallel": "use --tensor-parallel; DeepSpeed's own would take the groups over",
    "checkpoint": "checkpoints are layout-free files of this trainer",
    "activation_checkpointing": "use --activation-checkpointing; reentrant checkpointing of a "
    "shared block fails from ZeRO-2 on",
}


def read_ds_config(path: Path) -> dict:
    """Read and check DeepSpeed's JSON; UserError names file, key, value and what is allowed."""
    if not path.is_file():
        raise UserError(f"--deepspeed_config {path}: no such file")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--deepspeed_config {path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"--deepspeed_config {path}: expected an object, found {config!r}")
    for key, reason in STATED_ELSEWHERE.items():
        if key in config:
            raise UserError(f'--deepspeed_config {path}: "{key}" is refused: {reason}')
    unknown = sorted(set(config) - KNOWN_KEYS)
    if unknown:
        raise UserError(
            f'--deepspeed_config {path}: unknown key "{unknown[0]}"; '
            f"allowed: {', '.join(sorted(KNOWN_KEYS))}"
        )
    _check_optimizer(path, config.get("optimizer"))
    _refuse_broken(path, config.get("zero_optimization", {}))
    for block, allowed in NESTED_KEYS.items():
        unknown = sorted(set(config.get(block, {})) - allowed)
        if unknown:
            raise UserError(
                f'--deepspeed_config {path}: unknown key "{block}.{unknown[0]}"; '
                f"allowed: {', '.join(sorted(allowed))}"
            )
    _check_zero(path, config)
    return config


def _check_optimizer(path: Path, block) -> None:
    name = block.get("type") if isinstance(block, dict) else None
    if name not in OPTIMIZERS:
        raise UserError(
            f'--deepspeed_config {path}: "optimizer" needs "type", one of '
            f"{', '.join(OPTIMIZERS)}; found {name!r}"
        )
    unknown = sorted(set(block.get("params", {})) - OPTIMIZERS[name])
    if unknown:
        raise UserError(
            f'--deepspeed_config {path}: unknown optimizer.params "{unknown[0]}" for {name}; '
            f"allowed: {', '.join(sorted(OPTIMIZERS[name]))}"
        )


def _refuse_broken(path: Path, zero: dict) -> None:
    for key, reason in BROKEN_ZERO_SETTINGS.items():
        if zero.get(key):
            raise UserError(
                f"--deepspeed_config {path}: zero_optimization.{key} is refused: {reason}"
            )


def _check_zero(path: Path, config: dict) -> None:
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UserError(
            f"--deepspeed_config {path}: zero_optimization.stage {stage!r}; allowed: 0, 1, 2, 3"
        )
    if zero.get("compute_grad_norm") is False:
        raise UserError(
            f"--deepspeed_config {path}: zero_optimization.compute_grad_norm false is refused: "
            "without the norm a gradient that is not finite would be applied"
        )
    if config.get("bf16", {}).get("check_grad_overflow") is False:
        raise UserError(
            f"--deepspeed_config {path}: bf16.check_grad_overflow false is refused: ZeRO-2 and 3 "
            "would write a gradient that is not finite into the weights"
        )
    half = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")]
    if len(half) == 2:
        raise UserError(f"--deepspeed_config {path}: bf16 and fp16 are both enabled; choose one")
    if stage == 0 and half:
        raise UserError(
            f"--deepspeed_config {path}: {half[0]} with ZeRO stage 0 is refused: DeepSpeed's "
            f"wrapper for it {BROKEN_AT_STAGE_0[half[0]]}; stage 1 costs the same traffic"
        )


def check_fused_lamb(path: Path, config: dict, *, tensor_parallel: int) -> None:
    """Raise UserError where DeepSpeed's own LAMB would be wrong or cannot run."""
    if config["optimizer"]["type"] != "FusedLamb":
        return
    stage = config.get("zero_optimization", {}).get("stage", 0)
    reason = None
    if stage > 0:
        reason = (
            f"ZeRO stage {stage}: it takes the norm of a flat partition for that of a tensor, and "
            "is 43 to 52 % off its update after three steps on two ranks; allowed: stage 0"
        )
    elif tensor_parallel > 1:
        reason = (
            f"--tensor-parallel {tensor_parallel}: it takes the norm of a shard for that of a "
            "tensor, and is 3 % off its update after five steps on two ranks; allowed: 1"
        )
    else:
        import torch  # only here, since it is slow to import

        if not torch.cuda.is_available():
            reason = (
                "a machine without CUDA: its kernel exists for CUDA alone, DeepSpeed fails to "
                "build it in 9 of 9 combinations of stage and precision on a CPU"
            )
    if reason is not None:
        raise UserError(
            f'--deepspeed_config {path}: "FusedLamb" is refused with {reason}. "Lamb" is exact '
            "in every layout"
        )


BROKEN_AT_STAGE_0 = {
    "fp16": "divides the gradients by a loss scale that was never applied",
    "bf16": "takes a hidden optimizer step at start and misses shards in the gradient norm",
}


def resolve_ds_config(
    config: dict,
    *,
    batch_size: int,
    micro_batch_size: int,
    accumulation: int,
    learning_rate: float | None,
    default_learning_rate: float,
) -> dict:
    """Put the command line's numbers where the JSON says "auto" (or nothing); refuse the rest."""
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
    found = block.get(key, "auto")
    if found not in ("auto", value):
        raise UserError(
            f'--deepspeed_config has "{key}": {found}, but {flag} is {value}; '
            'allowed: the same number, or "auto"'
        )
    block[key] = value
