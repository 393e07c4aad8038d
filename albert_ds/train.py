"""Pretrain ALBERT under DeepSpeed: `deepspeed albert_ds/train.py --model ... --data ...`.

From the bottom up: `main` reads the command line and owns every ending, `train` is the loop,
`train_step` one optimizer step, `build` the model and its engine. Heavy libraries are imported
where they are used, so that `--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.config import RunConfig, read_config, write_run_files
from albert_ds.errors import ENDINGS, DamagedData, Stopped
from albert_ds.flags import peek_output
from albert_ds.parallel.mesh import build_mesh
from albert_ds.runtime.ending import conclude, name_failure, say, take_possession
from albert_ds.runtime.launch import join_world, read_world
from albert_ds.runtime.preemption import StopRequest
from albert_ds.runtime.roll_call import RollCall
from albert_ds.runtime.traffic import Traffic, record_traffic

if TYPE_CHECKING:
    import torch

    from albert_ds.data.samples import MicroBatch
    from albert_ds.parallel.mesh import Mesh
    from albert_ds.runtime.agreement import Counts
    from albert_ds.runtime.checkpoint import TrainState
    from albert_ds.runtime.engine import Engine
    from albert_ds.runtime.metrics import Window
    from albert_ds.runtime.saver import Saver


@dataclass(kw_only=True, slots=True)
class Run:
    """Everything a step needs; `step`, `updates` and `skipped_in_a_row` move on."""

    config: RunConfig
    mesh: Mesh
    device: torch.device
    engine: Engine
    batches: Iterator[MicroBatch]
    window: Window
    step: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0

    def is_due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the last one, is due now."""
        return self.step % every == 0 or self.step == self.config.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's micro-batches of one step, and what all ranks agreed on about it."""

    micro_batches: list[MicroBatch]
    counts: Counts  # of the global batch
    data_seconds: float  # spent waiting for the loader
    stop: bool  # some rank was asked to stop


def build(
    config: RunConfig, mesh: Mesh, device: torch.device, weights: dict | None = None
) -> Engine:
    """Model -> its tensor-parallel shard -> engine. `weights` take the place of initialisation."""
    import torch

    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.parallel.tensor import apply_tensor_parallel
    from albert_ds.runtime.engine import build_engine

    with torch.device("meta" if weights else "cpu"):
        model = AlbertForPretraining(
            config.model, seed=config.seed, activation_checkpointing=config.activation_checkpointing
        )
    if weights:
        model.load_state_dict(weights, assign=True)
    apply_tensor_parallel(model, mesh)
    if config.compile:
        model.albert.encoder.compile_blocks()
    return build_engine(model.to(device), mesh, config.deepspeed)


def next_batch(run: Run, *, stop: bool = False) -> Batch:
    """Take the next global batch. Collective: all learn of a wish to stop, and of damaged data."""
    from albert_ds.runtime.agreement import Counts, agree

    config, started, error = run.config, time.perf_counter(), None
    micro_batches: list[MicroBatch] = []
    accumulation = config.batch_size // (config.micro_batch_size * run.mesh.dp_size)
    try:
        micro_batches = [next(run.batches) for _ in range(accumulation)]
    except DamagedData as caught:
        error = caught
    seconds = time.perf_counter() - started
    mine = sum((Counts.of(batch) for batch in micro_batches), Counts())
    counts, stop = agree(run.mesh, mine, stop=stop, error=error)
    return Batch(micro_batches=micro_batches, counts=counts, data_seconds=seconds, stop=stop)


def train_step(run: Run, batch: Batch) -> float:
    """One optimizer step over the global batch; returns the gradient norm before clipping.

    Losses are normalised over the GLOBAL batch, so that the update does not depend on how the
    batch is cut into ranks and micro-batches.
    """
    from albert_ds.parallel.random import seed_step
    from albert_ds.runtime.engine import take_step

    engine = run.engine
    seed_step(run.config.seed, run.step, run.mesh.dp_rank)
    engine.set_learning_rate(run.config.rate_at(run.step))
    # DeepSpeed averages gradients over data-parallel ranks; these sums want their total.
    mlm_scale = run.mesh.dp_size / max(batch.counts.masked, 1)
    pair_scale = run.mesh.dp_size / max(batch.counts.pairs, 1)
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        outputs = engine.deepspeed(**micro_batch.on(run.device))
        loss = outputs["mlm_loss_sum"] * mlm_scale + outputs["pair_loss_sum"] * pair_scale
        engine.deepspeed.backward(loss, scale_wrt_gas=False)
        run.window.add_outputs(outputs)
        if number < len(batch.micro_batches):
            engine.deepspeed.step()
    gradient_norm, applied = take_step(engine)
    run.step += 1
    run.updates += applied
    run.skipped_in_a_row = 0 if applied else run.skipped_in_a_row + 1
    run.window.add_step(batch.counts, data_seconds=batch.data_seconds, applied=applied)
    return gradient_norm


def train(run: Run, request: StopRequest) -> None:
    """Train to the last step; raises the ending that comes before."""
    from albert_ds.runtime.health import check_health
    from albert_ds.runtime.metrics import Metrics
    from albert_ds.runtime.saver import Saver

    config = run.config
    saver = Saver(run.engine, config, resumed_at=run.step)
    metrics = Metrics(config.run, run.mesh, run.step, num_steps=config.steps, wandb=config.wandb)

    while run.step < config.steps:
        batch = next_batch(run, stop=request.reason is not None)
        if batch.stop:
            save(run, saver)
            saver.wait()
            reason = request.reason or "another rank was asked to stop"
            raise Stopped(f"stopped after step {run.step} of {config.steps}: {reason}")
        gradient_norm = train_step(run, batch)
        check_health(
            run.engine, step=run.step, skipped_in_a_row=run.skipped_in_a_row, output=config.run
        )
        if run.is_due(config.log_every):
            metrics.write(run.step, describe_window(run, gradient_norm))
        if run.is_due(config.eval_every):
            metrics.write(run.step, evaluate(run))
        # While steps are skipped nothing new is kept, so the newest checkpoint is a good one.
        if run.step == config.steps or (run.is_due(config.save_every) and not run.skipped_in_a_row):
            save(run, saver)
    saver.wait()
    metrics.close()


def prepare(config: RunConfig, mesh: Mesh, device: torch.device, traffic: Traffic) -> Run:
    """Everything between the command line and the first step."""
    from albert_ds.runtime.metrics import Window

    engine, state = start(config, mesh, device)
    return Run(
        config=config,
        mesh=mesh,
        device=device,
        engine=engine,
        batches=open_stream(config, mesh, state.samples),
        window=Window(device, traffic),
        step=state.step,
        updates=state.updates,
    )


def start(config: RunConfig, mesh: Mesh, device: torch.device) -> tuple[Engine, TrainState]:
    """Decide where to start, in this order, and build the engine there.

    1. The newest complete checkpoint of RUN: weights and optimizer.
    2. --init-from: its weights, a fresh optimizer, step 0.
    3. Initialisation from --seed.
    """
    from albert_ds.interop import read_initial_weights
    from albert_ds.runtime import checkpoint
    from albert_ds.runtime.agreement import from_rank_0

    folder, damaged = checkpoint.find_newest(config.run) if mesh.rank == 0 else (None, [])
    for line in damaged:
        say(line)
    folder = from_rank_0(mesh, folder)
    if folder is not None:
        weights = checkpoint.read_tensors(folder / "weights.safetensors")
        engine = build(config, mesh, device, weights)
        state = checkpoint.restore(folder, engine)
        if mesh.rank == 0:
            say(f"resuming from {folder}: step {state.step} of {config.steps}")
        return engine, state
    weights = None
    if config.init_from is not None:
        weights = read_initial_weights(Path(config.init_from), config.model)
    engine = build(config, mesh, device, weights)
    return engine, checkpoint.TrainState(step=0, samples=0, updates=0, loss_scale=None)


def open_stream(config: RunConfig, mesh: Mesh, samples: int) -> Iterator[MicroBatch]:
    """This rank's endless micro-batches, from position `samples` of the global stream on."""
    from albert_ds.data.shards import open_shards
    from albert_ds.data.stream import training_batches

    return training_batches(
        [open_shards(folder, "train") for folder in config.data],
        config.data_weights,
        config.stream,
        start=samples,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        num_workers=config.num_workers,
    )


def describe_window(run: Run, gradient_norm: float) -> dict:
    """The numbers of a logging interval. Collective."""
    values = run.window.close(run.mesh, run.config.model, run.config.stream.objective)
    return {
        "samples": run.step * run.config.batch_size,
        **values,
        "lr": run.config.rate_at(run.step - 1),
        "grad_norm": gradient_norm,
    }


def evaluate(run: Run) -> dict:
    """Held-out metrics, on the first DATA. Collective."""
    from albert_ds.evals.heldout import evaluate_heldout

    config = run.config
    with run.window.paused():
        return evaluate_heldout(
            run.engine.deepspeed.module,
            config.data[0],
            config.stream,
            limit=config.eval_samples,
            micro_batch_size=config.micro_batch_size,
            mesh=run.mesh,
            device=run.device,
        )


def save(run: Run, saver: Saver) -> None:
    """Begin to write a complete checkpoint of where the run is. Collective."""
    from albert_ds.runtime.checkpoint import TrainState, read_loss_scale

    state = TrainState(
        step=run.step,
        samples=run.step * run.config.batch_size,
        updates=run.updates,
        loss_scale=read_loss_scale(run.engine),
    )
    with run.window.paused():
        saver.save(state)


def main(argv: list[str]) -> int:
    world = mesh = roll = run = lock = None
    try:
        world = read_world()
        config = read_config(argv, world_size=world.size)
        request = StopRequest(config.run, config.max_hours)
        traffic = record_traffic()
        device = join_world(world, timeout_minutes=config.timeout_minutes)
        roll = RollCall(world, config.run, minutes=config.timeout_minutes)
        mesh = build_mesh(config.tensor_parallel, timeout_minutes=config.timeout_minutes + 1)
        lock = take_possession(config.run, mesh, lambda: write_run_files(config))
        run = prepare(config, mesh, device, traffic)
        run.batches = roll.follow(run.batches)
        train(run, request)
        code, reason = 0, "all steps done"
    except ENDINGS as ending:
        code, reason = ending.code, str(ending)
    except (RuntimeError, OSError) as error:
        code, reason = name_failure(error, roll)
    step = run.step if run else None
    conclude(world, mesh, lock, peek_output(argv), code=code, reason=reason, step=step, roll=roll)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
