"""The loop of fine-tuning, one for every task (section 4.9 of the paper), and what it is made of.

`tune_seeds` is all of a run, `tune` the part of one seed, `train` its loop. The weights with the
best evaluation on the dev set are kept (early stopping) and make the predictions at the end.

OUTPUT/checkpoints/step-00000800/        for resuming: weights, moments, step
OUTPUT/checkpoints/best/                 the weights of the best evaluation, its step and value
"""

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from shlex import quote
from types import NoneType

import numpy as np
import torch
import torch.distributed as dist

from albert_ds.base.cli import log_line
from albert_ds.base.errors import DamagedData, UserError
from albert_ds.base.files import write_json
from albert_ds.base.json_files import read_json
from albert_ds.checkpoint.folder import BEST, WEIGHTS, Checkpoint, open_best, write_folder
from albert_ds.checkpoint.gather import Saver, gather, open_start
from albert_ds.checkpoint.origin import describe_start
from albert_ds.checkpoint.run_folder import RunLock
from albert_ds.data.micro_batch import to_device
from albert_ds.engine.deepspeed_config import precision_of
from albert_ds.engine.engine import build_engine
from albert_ds.model.shapes import build_shapes
from albert_ds.model.task_heads import AlbertForTask
from albert_ds.parallel.consensus import Counts, agree, from_rank_0, raise_together
from albert_ds.parallel.mesh import Mesh
from albert_ds.parallel.random import seed_step
from albert_ds.process.stop_request import StopRequest
from albert_ds.settings.finetune import FinetuneConfig, Opened, describe_rate
from albert_ds.settings.shared import check_resume, read_previous, write_config
from albert_ds.tasks.features import Split, collate
from albert_ds.tasks.inference import predict
from albert_ds.tasks.registry import Task
from albert_ds.training.metrics import METRICS, TICK, Metrics, cut_back
from albert_ds.training.results import (
    find_constant,
    open_splits,
    score_splits,
    summarise_seeds,
    write_results,
)
from albert_ds.training.run import TrainingRun, cut_model, go_on
from albert_ds.training.screen import print_facts, print_header
from albert_ds.training.trainer import TrainerProcess

NO_BEST = (0, -math.inf)


@dataclass(kw_only=True, slots=True)
class Run(TrainingRun):
    """Everything a step needs.

    An evaluation changes `evaluations`, `best` and `kept`, where NaN counts as the worst.
    """

    config: FinetuneConfig
    splits: dict[str, Split]
    task: Task
    batches: Iterator[list[int]]  # this rank's units, a list a step
    evaluations: list[int]  # their steps
    best: tuple[int, float] = NO_BEST  # step and metric of the first of the best evaluations
    kept: Checkpoint  # its weights

    @property
    def is_over(self) -> bool:
        """All steps are done, or none of the last `patience` evaluations was a new best."""
        patience = self.config.patience
        later = sum(step > self.best[0] for step in self.evaluations)
        return self.step >= self.config.steps or (patience is not None and later >= patience)


def start(
    config: FinetuneConfig,
    opened: Opened,
    splits: dict[str, Split],
    mesh: Mesh,
    device: torch.device,
    lock: RunLock | None = None,
) -> Run:
    """Build the engine from the first of these that exists. Collective.

    1. The newest complete checkpoint of OUTPUT.
    2. The encoder of --from-task or --checkpoint, unless --from-scratch.
    3. Random weights.
    """
    checkpoint = open_start(config.run, mesh, build_shapes(config.model, config.head))
    weights = None
    if checkpoint is not None:
        weights = checkpoint.read(WEIGHTS)
    elif not config.from_scratch:
        weights = read_start(config, opened, mesh)
    model = build_model(config, mesh, weights)
    engine = build_engine(model.to(device), mesh, config.deepspeed)
    state = go_on(config, engine, checkpoint)
    kept, evaluations, best = restore_best(config, mesh, opened.task.metrics[0], state.step)
    return Run(
        config=config,
        splits=splits,
        mesh=mesh,
        device=device,
        engine=engine,
        task=opened.task,
        batches=draw_units(config, splits["train"].features.units, mesh, state.step),
        lock=lock,
        evaluations=evaluations,
        best=best,
        kept=kept,
        step=state.step,
        updates=state.updates,
    )


def read_start(config: FinetuneConfig, opened: Opened, mesh: Mesh) -> dict:
    """The encoder to start from; UserError if --from-task has another shape or vocabulary."""
    folder = opened.start
    encoder, weights = folder.read_encoder()
    for name in (f.name for f in fields(encoder) if f.name not in ("dropout", "pair_head")):
        value = getattr(encoder, name)
        expected = getattr(config.model, name)
        if value != expected:
            raise UserError(
                f"--from-task {folder.path}: its {name} is {value}, that of --checkpoint "
                f"{expected}; they must be the same"
            )
    # By its pieces: a tokenizer.json makes another file of the same ones.
    if config.from_task and folder.vocab.pieces != opened.source.vocab.pieces:
        raise UserError(f"--from-task {folder.path}: has another vocabulary than --checkpoint")
    if config.model.pair_head and not encoder.pair_head and mesh.rank == 0:
        log_line(
            f"{folder.path} has no pooler: the pooler starts from random weights, like the head"
        )
    return {n: x for n, x in weights.items() if config.model.pair_head or "pooler" not in n}


def build_model(config: FinetuneConfig, mesh: Mesh, weights: dict | None) -> AlbertForTask:
    """The model, or its tensor-parallel shard, on the host.

    `weights` may hold the encoder alone; other parameters keep their initialisation.
    """
    model = AlbertForTask(config.model, config.head, seed=config.seed)
    if weights is not None:
        _, unknown = model.load_state_dict(weights, strict=False)
        assert not unknown, unknown
    cut_model(model, mesh)
    return model


def draw_units(config: FinetuneConfig, units: int, mesh: Mesh, step: int) -> Iterator[list[int]]:
    """This rank's training units, a list a step, after `step` finished ones and without end.

    Every epoch has its own permutation of the `units`.
    """
    for begin in count(step * config.batch_size, config.batch_size):
        positions = range(begin + mesh.dp_rank, begin + config.batch_size, mesh.dp_size)
        yield [int(order_of(config.seed, p // units, units)[p % units]) for p in positions]


@lru_cache(maxsize=2)  # a step may span two epochs
def order_of(seed: int, epoch: int, units: int) -> np.ndarray:
    """The permutation of one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(units)


def restore_best(
    config: FinetuneConfig, mesh: Mesh, metric: str, step: int
) -> tuple[Checkpoint, list[int], tuple[int, float]]:
    """`kept`, `evaluations` and `best` of a run that goes on after `step`. Collective.

    Raises DamagedData or UserError on all ranks if the best weights are gone or not whole.
    """
    kept = Checkpoint(config.run / BEST)
    steps = []
    best = NO_BEST
    with raise_together(mesh):
        if mesh.rank == 0:
            whole = open_best(config.run, build_shapes(config.model, config.head))
            steps = list_evaluations(config.run, f"dev_{metric}", step)
            if whole:  # it may be of an evaluation that came after the last checkpoint
                kept = whole
                value = whole.record["value"]
                best = whole.record["step"], -math.inf if value is None else value
            elif steps:
                raise DamagedData(f"{config.run / BEST} is gone; move {config.run} away")
    return kept, *from_rank_0(mesh, (steps, best))


def list_evaluations(run: Path, name: str, last: int) -> list[int]:
    """The steps up to `last` whose metrics have the metric `name` of the dev set.

    What comes after `last`, RUN/metrics.jsonl loses.
    """
    steps = []
    left_out = 0
    for record in cut_back(run, last):
        if type(record.get(name)) not in (int, float, NoneType):
            left_out += 1
        elif name in record and record["step"] not in steps:
            steps.append(record["step"])
    if left_out:
        log_line(f"{run / METRICS}: {left_out} lines have no number as {name}; they are left out")
    return steps


def keep_best(run: Run) -> None:
    """Write OUTPUT/checkpoints/best. Collective; raises Diverged or MachineFailed on all ranks."""
    tensors = {WEIGHTS: gather(run.engine, WEIGHTS)}
    step, value = run.best
    # JSON has no infinity.
    facts = {"step": step, "value": value if math.isfinite(value) else None}
    run.kept = Checkpoint(run.config.run / BEST)  # the one before is let go
    with raise_together(run.mesh):
        if run.mesh.rank == 0:
            write_folder(run.config.run / BEST, tensors, facts, run.lock)


def save(run: Run, saver: Saver) -> None:
    """Write a complete checkpoint of the current state, unless there is one. Collective."""
    run.save(saver)
    saver.wait()  # the best weights are written to the same folder


def train_step(run: Run) -> tuple[float, float, int]:
    """One optimizer step; returns this rank's sum of losses, the gradient norm, and its tokens."""
    config = run.config
    engine = run.engine
    seed_step(config.seed, run.step, run.mesh.dp_rank)
    engine.set_learning_rate(config.rate_at(run.step))
    units = next(run.batches)
    size = config.micro_batch_size
    total = 0.0
    tokens = 0
    for begin in range(0, len(units), size):
        part = units[begin : begin + size]
        tensors = collate(run.splits["train"].features, part, with_targets=True)
        tokens += len(tensors["input_ids"])
        loss = engine.deepspeed(**to_device(tensors, run.device))["loss_sum"]
        # DeepSpeed averages gradients over data-parallel ranks; the loss needs their sum.
        scaled = loss * (run.mesh.dp_size / config.batch_size)
        engine.backward(scaled, is_last=begin + size >= len(units))
        total = total + loss.detach()
    norm, applied = engine.take_step()
    run.count_step(applied=applied)
    return total, norm, tokens


def train(run: Run, metrics: Metrics, request: StopRequest) -> None:
    """Train to the end. Raises Stopped, Diverged or MachineFailed before it."""
    config = run.config
    saver = Saver(run.engine, config.run, keep_last=1, lock=run.lock, resumed_at=run.step)
    losses = 0.0
    tokens = 0
    steps = 0
    started = time.perf_counter()
    loss = 0.0
    while not run.is_over:
        _, stop = agree(run.mesh, Counts(), stop=request.reason is not None)
        # After a skipped step the weights may have diverged: a stop waits for a step that is not.
        if stop and not run.skipped_in_a_row:
            save(run, saver)
            raise run.stopped(request)
        loss, norm, count = train_step(run)
        losses = losses + loss
        tokens += count
        steps += 1
        metrics.advance(run.step)
        run.check_health()
        if run.is_due(config.log_every):
            seconds = max(time.perf_counter() - started, TICK)
            values = describe_window(run, losses, tokens, steps, seconds)
            metrics.write(run.step, {**values, "grad_norm": norm})
            losses = 0.0
            tokens = 0
            steps = 0
            started = time.perf_counter()
        before = time.perf_counter()
        if run.is_due(config.eval_every):
            metrics.write(run.step, evaluate(run))
        if run.is_due(config.save_every) and not run.skipped_in_a_row:
            save(run, saver)
        started += time.perf_counter() - before
    if run.skipped_in_a_row:  # an overflow of the gradient alone, or a divergence?
        _, is_lost = agree(run.mesh, Counts(), stop=not math.isfinite(loss))
        if is_lost:
            raise run.diverged()


def describe_window(run: Run, losses, tokens: int, steps: int, seconds: float) -> dict:
    """Means since the last log line over all ranks. Collective."""
    sums = torch.tensor([float(losses), float(tokens)], dtype=torch.float64, device=run.device)
    dist.all_reduce(sums, group=run.mesh.dp_group)
    samples = steps * run.config.batch_size
    return {
        "loss": float(sums[0]) / samples,
        "lr": run.config.rate_at(run.step - 1),
        "step_seconds": seconds / steps,
        "samples_per_second": samples / seconds,
        "tokens_per_second": float(sums[1]) / seconds,
    }


def evaluate(run: Run) -> dict:
    """Metrics of the dev set; keeps the weights if they are the best so far. Collective."""
    module = run.engine.deepspeed.module
    outputs = {
        name: predict(module, run.splits[name].features, run.mesh, run.device)
        for name in run.task.dev_splits
    }
    scores = score_splits(run.task, run.splits, outputs) if run.mesh.rank == 0 else None
    scores = from_rank_0(run.mesh, scores)
    value = scores[run.task.metrics[0]]
    value = value if math.isfinite(value) else -math.inf
    run.evaluations.append(run.step)
    if run.best == NO_BEST or value > run.best[1]:
        run.best = run.step, value
        keep_best(run)
    return {f"dev_{name}": value for name, value in scores.items()}


def tune(
    config: FinetuneConfig,
    opened: Opened,
    splits: dict[str, Split],
    process: TrainerProcess,
    lock: RunLock | None,
) -> dict:
    """Results of the run of one seed; one that is finished is read, not repeated. Collective."""
    mesh = process.mesh
    done = config.run / "results.json"
    results = from_rank_0(mesh, read_json(done) if done.is_file() else None)
    if results is not None and "seeds" not in results:  # else a summary of several runs
        return results
    run = start(config, opened, splits, mesh, process.device, lock)
    process.track(run)
    print_start(run)
    metrics = Metrics(config.run, mesh, run.step, num_steps=config.steps)
    train(run, metrics, process.stop_request)
    metrics.close()
    # Free the weights, gradients and moments: 20 bytes a parameter in 16 bits.
    run.engine.deepspeed.destroy()
    del run.engine
    gc.collect()  # DeepSpeed's objects refer to each other
    return write_predictions(run)


def print_start(run: Run) -> None:
    """Show what is fine-tuned on what. Collective."""
    config = run.config
    held = run.splits["train"].features
    counts = ", ".join(f"{number:,} {what}" for what, number in held.counts.items())
    epochs = config.steps * config.batch_size / held.units
    data = f"{config.data}: {counts}; {config.steps:,} steps are {epochs:.3g} epochs"
    work = f"fine-tuning on {config.task}, seed {config.seed}"
    print_header(run, work, config.checkpoint, {"data": data})


def print_results(config: FinetuneConfig) -> None:
    """Show what was written, and what to run next."""
    run = quote(config.output)
    facts = {
        "results": str(config.run / "results.json"),
        "curves": f"tensorboard --logdir {run}",
    }
    if config.seeds == 1:
        facts["export"] = f"albert-ds export --checkpoint {run} --output {run}-hf"
    print_facts(f"done: {config.output}", facts)


def write_predictions(run: Run) -> dict:
    """Predict every split except train with the best weights; score, write. Collective."""
    config = run.config
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    module = build_model(config, run.mesh, run.kept.read(WEIGHTS))
    module = module.to(run.device, kinds[precision_of(config.deepspeed)])
    outputs = {
        name: predict(module, split.features, run.mesh, run.device)
        for name, split in run.splits.items()
        if name != "train"
    }
    results = None
    if run.mesh.rank == 0:
        if run.lock is not None:
            run.lock.check()
        about = {"seed": config.seed, "best_step": run.best[0], "step": run.step}
        results = write_results(config.run, config.task, run.task, run.splits, outputs, about)
        scores = ", ".join(f"{name} {value:.4f}" for name, value in results["dev"].items())
        log_line(f"{config.task}, seed {config.seed}, best at step {run.best[0]}: {scores}")
        for line in find_constant(config.task, run.task, run.splits, outputs):
            log_line(line)
    return from_rank_0(run.mesh, results)


def prepare(config: FinetuneConfig, opened: Opened, mesh: Mesh) -> dict[str, Split]:
    """Tokenise, and write OUTPUT's files. Collective."""
    for line in describe_start(opened.source, {}) * (mesh.rank == 0):
        log_line(line)
    splits = open_splits(config, opened.task, opened.source.vocab, mesh)
    with raise_together(mesh):
        if mesh.rank == 0:
            longest = int(splits["train"].features.lengths.max())
            before = write_run_files(config, opened, longest)
            log_line(f"{config.task}: {describe_rate(config)}")
            if 0 < before < longest:
                log_line(
                    f"{config.task}: examples of up to {longest} tokens; the start has seen "
                    f"{before}, so the positions behind them are untrained"
                )
    return splits


def write_run_files(config: FinetuneConfig, opened: Opened, longest: int) -> int:
    """RUN/config.json, and the vocabulary, so that an export needs nothing but RUN.

    `longest` are the tokens of the longest training sequence; returns those of the longest that
    the weights have seen before. Raises UserError where RUN was started with other settings.
    """
    # Another start may have written RUN/config.json since the command line was read.
    check_resume(config, read_previous(config.run), opened.ds_config)
    before = 0 if config.from_scratch else opened.start.trained_length
    write_config(config, trained_length=max(longest, before))
    opened.source.vocab.write(config.run)
    return before


def tune_seeds(
    config: FinetuneConfig,
    opened: Opened,
    splits: dict[str, Split],
    process: TrainerProcess,
    lock: RunLock | None,
) -> None:
    """One run in OUTPUT itself, or several in OUTPUT/seed-S and their summary in OUTPUT.

    lock: of OUTPUT. Collective.
    """
    if config.seeds == 1:
        tune(config, opened, splits, process, lock)
        return
    mesh = process.mesh
    results = []
    for seed in range(config.seed, config.seed + config.seeds):
        one = replace(config, seed=seed, seeds=1, output=str(config.run / f"seed-{seed}"))
        with raise_together(mesh):
            if mesh.rank == 0:
                one.run.mkdir(parents=True, exist_ok=True)
                lock = RunLock(one.run)
                write_run_files(one, opened, int(splits["train"].features.lengths.max()))
        results.append(tune(one, opened, splits, process, lock))
        if lock is not None:
            lock.release()
    if mesh.rank == 0:
        summary = summarise_seeds(results)
        write_json(config.run / "results.json", summary)
        for name, scores in summary["dev"].items():
            log_line(
                f"{config.task} {name} over {config.seeds} seeds: median {scores['median']:.4f}, "
                f"mean {scores['mean']:.4f}, std {scores['std']:.4f}"
            )
