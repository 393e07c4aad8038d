"""The product's own step on several ranks, from given samples."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from albert_ds.data.stream_config import StreamConfig
from albert_ds.engine.deepspeed_config import read_ds_config, resolve_ds_config
from albert_ds.model.config import SIZES, ModelConfig
from albert_ds.settings.pretrain import RunConfig
from tests.batches import concatenate, random_samples

DS_CONFIGS = Path(__file__).parents[1] / "ds_configs"
SMALL = replace(
    SIZES["albert-tiny"],
    **dict(vocab_size=101, embedding_size=16, hidden_size=32, ffn_size=64),
    **dict(num_layers=3, num_heads=4, max_position_embeddings=32, dropout=0.0),
)


def small_config(
    *,
    world_size: int,
    tensor_parallel: int = 1,
    batch_size: int = 8,
    micro_batch_size: int = 2,
    ds_file: str = "zero1_fp32.json",
    stage: int | None = None,
    ds_changes: dict | None = None,
    model: ModelConfig = SMALL,
    steps: int = 100,
    output: str = "unused",
    seed: int = 0,
    activation_checkpointing: str = "none",
    **settings,
) -> RunConfig:
    """A run of a very small model; `stage` and `ds_changes` are merged into the shipped JSON."""
    ds_config = read_ds_config(DS_CONFIGS / ds_file)
    stages = {} if stage is None else {"zero_optimization": {"stage": stage}}
    for key, value in {**stages, **(ds_changes or {})}.items():
        old = ds_config.get(key)
        ds_config[key] = {**old, **value} if isinstance(old, dict) else value
    ranks = world_size // tensor_parallel
    return RunConfig(
        size="albert-tiny",
        model=model,
        stream=StreamConfig(
            objective="sop" if model.pair_head else "none", sequence_length=32, seed=seed
        ),
        data=[],
        data_weights=[],
        data_sha256=[],
        output=output,
        steps=steps,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        warmup_steps=2,
        tensor_parallel=tensor_parallel,
        activation_checkpointing=activation_checkpointing,
        seed=seed,
        deepspeed_config=ds_file,
        deepspeed=resolve_ds_config(
            json.loads(json.dumps(ds_config)),
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            accumulation=batch_size // (micro_batch_size * ranks),
            learning_rate=None,
            default_learning_rate=0.01,
        ),
        **settings,
    )


def small_batches(steps: int, size: int = 8, *, max_length: int = 32) -> list[list[dict]]:
    """Samples of `size` a step for `small_config`'s model."""
    options = {"vocab_size": SMALL.vocab_size, "max_length": max_length}
    return [random_samples(size, **options, seed=seed) for seed in range(steps)]


def rank_batches(config: RunConfig, mesh, batches: list[list[dict]]):
    """This rank's micro-batches of each global batch: every dp_size-th sample, as in the stream."""
    for samples in batches:
        share = samples[mesh.dp_rank :: mesh.dp_size]
        for at in range(0, len(share), config.micro_batch_size):
            yield concatenate(share[at : at + config.micro_batch_size])


@cache
def join(tensor_parallel: int):
    """Join the world as `main` does, once; returns (device, mesh)."""
    from albert_ds.parallel.mesh import build_mesh
    from albert_ds.process.rendezvous import join_world
    from albert_ds.process.world import read_world

    torch.set_num_threads(1)
    device = join_world(read_world())
    return device, build_mesh(tensor_parallel)


def open_small_run(config: RunConfig, batches: list[list[dict]]):
    """A Run of this rank over the given global batches."""
    from albert_ds.training.metrics import Window
    from albert_ds.training.pretrain import Run, build

    device, mesh = join(config.tensor_parallel)
    return Run(
        config=config,
        mesh=mesh,
        device=device,
        engine=build(config, mesh, device),
        batches=rank_batches(config, mesh, batches),
        window=Window(device),
    )


def take_step(run) -> float:
    """One step of the trainer's own; the norm of its gradient."""
    from albert_ds.training.pretrain import next_batch, train_step

    return train_step(run, next_batch(run))


def save(run) -> None:
    """The trainer's own checkpoint, written whole."""
    from albert_ds.checkpoint.gather import Saver
    from albert_ds.training import pretrain

    run.config.run.mkdir(parents=True, exist_ok=True)
    saver = Saver(run.engine, run.config.run, keep_last=run.config.keep_last)
    pretrain.save(run, saver)
    saver.wait()


def resume(run, batches: list[list[dict]]):
    """The run as its checkpoint continues it, with another engine."""
    from albert_ds.training.pretrain import start

    save(run)
    engine, state = start(run.config, run.mesh, run.device, None)
    assert state.step == state.updates == run.step == run.updates
    rest = rank_batches(run.config, run.mesh, batches[state.step :])
    return replace(run, engine=engine, batches=rest)


def gather(engine, kind: str = "weights.safetensors") -> dict[str, torch.Tensor]:
    """What a checkpoint would hold of an engine now, on rank 0."""
    from albert_ds.checkpoint import gather as product

    return product.gather(engine, kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The results of a run over given batches; the tensors are logical ones, on rank 0."""

    initial: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    metrics: list[dict]  # of each step
    norms: list[float]

    @property
    def losses(self) -> list[float]:
        return [metrics["loss"] for metrics in self.metrics]


def train_ranks(rank: int, configs: list[RunConfig], batches: list[list[dict]]) -> list[Trained]:
    """Train each config over `batches`, one after the other in the same processes."""
    results = []
    for config in configs:
        run = open_small_run(config, batches)
        initial = gather(run.engine)
        metrics, norms = [], []
        for _ in batches:
            norms.append(take_step(run))
            metrics.append(run.window.close(run.mesh, config.stream.objective))
        weights = gather(run.engine)
        results.append(Trained(initial=initial, weights=weights, metrics=metrics, norms=norms))
    return results
