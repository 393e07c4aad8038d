"""Configurations for measurements: of runs without a RUN folder, which `measurement.py` opens."""

from dataclasses import replace
from pathlib import Path

from albert_ds.base.errors import UserError
from albert_ds.data.stream_config import StreamConfig, gradient_accumulation_steps
from albert_ds.engine.deepspeed_config import read_ds_config, resolve_ds_config
from albert_ds.model.config import ModelConfig
from albert_ds.process.world import wants_cpu
from albert_ds.settings.pretrain import RunConfig
from albert_ds.settings.shared import check_tensor_parallel


def count_gpus() -> int:
    """The GPUs that this process sees and may use."""
    import torch

    return 0 if wants_cpu() else torch.cuda.device_count()


def bench_config(
    name: str,
    model: ModelConfig,
    *,
    deepspeed_config: str,
    micro_batch_size: int,
    sequence_length: int,
    ranks: int = 1,
    tensor_parallel: int = 1,
    accumulation: int = 1,
    activation_checkpointing: str = "none",
    data: list[str] | None = None,
) -> RunConfig:
    """The configuration of a run without a last step.

    data: folders of build_shards.py; without them, rows of random ids. Raises UserError for what no
    run can have.
    """
    check_tensor_parallel(tensor_parallel, model, ranks)
    longest = model.max_position_embeddings
    if sequence_length > longest:
        raise UserError(f"--sequence-length {sequence_length}: {name} has {longest} positions")
    batch_size = micro_batch_size * accumulation * (ranks // tensor_parallel)
    weights: list[float] = []
    if data:
        from albert_ds.data.shards import open_shards

        sources = [open_shards(folder, "train") for folder in data]
        model = replace(model, vocab_size=sources[0].vocab.size)
        weights = [float(source.sizes.sum()) for source in sources]
    return RunConfig(
        size=name,
        model=model,
        stream=StreamConfig(sequence_length=sequence_length),
        data=data or [],
        data_weights=weights,
        data_sha256=[],
        output="",
        steps=10**9,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        warmup_steps=0,
        tensor_parallel=tensor_parallel,
        activation_checkpointing=activation_checkpointing,
        deepspeed_config=deepspeed_config,
        deepspeed=resolve_ds_config(
            read_ds_config(Path(deepspeed_config)),
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            learning_rate=None,
            default_learning_rate=1e-4,
        ),
    )


def stage_of(ds_config: dict) -> int:
    return ds_config.get("zero_optimization", {}).get("stage", 0)


def accumulation_of(config: RunConfig, dp_size: int) -> int:
    """Micro-batches of an optimizer step on one data-parallel rank."""
    return gradient_accumulation_steps(config.batch_size, config.micro_batch_size, dp_size)
