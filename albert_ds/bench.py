"""Runs that are only measured: the trainer's own `build` and steps, and no RUN folder.

Shared by the tools that compare speed, memory and traffic, so that none of them measures a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.config import RunConfig
from albert_ds.data.samples import MicroBatch, StreamConfig
from albert_ds.errors import UserError
from albert_ds.model.config import ModelConfig
from albert_ds.runtime.ds_config import read_ds_config, resolve_ds_config

if TYPE_CHECKING:
    import torch

    from albert_ds.parallel.mesh import Mesh
    from albert_ds.runtime.traffic import Traffic
    from albert_ds.train import Run


def bench_config(
    name: str,
    model: ModelConfig,
    *,
    deepspeed_config: str,
    zero: int | None = None,
    micro_batch_size: int,
    sequence_length: int,
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    accumulation: int = 1,
    activation_checkpointing: str = "none",
    compile: bool = False,
    data: list[str] | None = None,
) -> RunConfig:
    """The configuration of a run whose steps never end; `data`, else rows of random ids.

    `zero` takes the place of the stage in DeepSpeed's JSON.
    """
    batch_size = micro_batch_size * accumulation * data_parallel
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
        compile=compile,
        deepspeed_config=deepspeed_config,
        deepspeed=resolve_ds_config(
            _read_at_stage(deepspeed_config, zero),
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            learning_rate=None,
            default_learning_rate=1e-4,
        ),
    )


def _read_at_stage(file: str, zero: int | None) -> dict:
    config = read_ds_config(Path(file))
    if zero is None:
        return config
    if zero == 0 and precision_of(config) != "fp32":
        raise UserError(
            f"--zero 0 with --deepspeed_config {file}: {precision_of(config)} is refused at stage "
            "0; allowed: 1, 2, 3"
        )
    return {**config, "zero_optimization": {**config.get("zero_optimization", {}), "stage": zero}}


def precision_of(ds_config: dict) -> str:
    """The weights' type in forward and backward: bf16, fp16 or fp32."""
    half = [name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")]
    return half[0] if half else "fp32"


def stage_of(ds_config: dict) -> int:
    return ds_config.get("zero_optimization", {}).get("stage", 0)


def open_bench_run(config: RunConfig, mesh: Mesh, device: torch.device, traffic: Traffic) -> Run:
    """The engine and its batches, ready to step. Collective."""
    from albert_ds.runtime.metrics import Window
    from albert_ds.train import Run, build

    return Run(
        config=config,
        mesh=mesh,
        device=device,
        engine=build(config, mesh, device),
        batches=_open_batches(config, mesh),
        window=Window(device, traffic),
    )


def _open_batches(config: RunConfig, mesh: Mesh) -> Iterator[MicroBatch]:
    from albert_ds.data.synthetic import synthetic_batches
    from albert_ds.train import open_stream

    if config.data:
        return open_stream(config, mesh, 0)
    return synthetic_batches(
        config.stream,
        vocab_size=config.model.vocab_size,
        micro_batch_size=config.micro_batch_size,
        seed=mesh.dp_rank,
    )
