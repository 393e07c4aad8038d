"""Fine-tune ALBERT under DeepSpeed: `deepspeed albert_ds/finetune.py --task glue/mrpc ...`.

One loop over any task (section 4.9). From the bottom up: `main` reads the command line and owns
every ending, `tune` is one run of one seed, `train` its loop. The evaluation that does best on the
dev set is what is kept (early stopping); predictions are made with it at the end.
"""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.errors import ENDINGS, Stopped, UserError
from albert_ds.flags import peek_output
from albert_ds.interop import BEST, OURS, locate
from albert_ds.parallel.mesh import build_mesh
from albert_ds.runtime.ending import conclude, name_failure, say, take_possession
from albert_ds.runtime.launch import join_world, read_world
from albert_ds.runtime.preemption import StopRequest
from albert_ds.runtime.roll_call import RollCall
from albert_ds.tuning.config import (
    FinetuneConfig,
    check_resume,
    read_config,
    resolve_steps,
    write_run_files,
)
from albert_ds.tuning.run import Run, build_model, keep_best, save, start

if TYPE_CHECKING:
    import torch

    from albert_ds.parallel.mesh import Mesh
    from albert_ds.runtime.metrics import Metrics
    from albert_ds.tasks.features import Split


def train_step(run: Run) -> tuple[float, float, int]:
    """One optimizer step; returns this rank's sum of losses, the gradient norm, and its tokens."""
    from albert_ds.parallel.random import seed_step
    from albert_ds.runtime.engine import take_step
    from albert_ds.tasks.features import collate

    config, engine = run.config, run.engine
    seed_step(config.seed, run.step, run.mesh.dp_rank)
    engine.set_learning_rate(config.rate_at(run.step))
    units, size = next(run.batches), config.micro_batch_size
    total, tokens = 0.0, 0
    for begin in range(0, len(units), size):
        part = units[begin : begin + size]
        tensors = collate(run.splits["train"].features, part, with_targets=True)
        tokens += len(tensors["input_ids"])
        on_device = {k: x if type(x) is int else x.to(run.device) for k, x in tensors.items()}
        loss = engine.deepspeed(**on_device)["loss_sum"]
        # DeepSpeed averages gradients over data-parallel ranks; this sum wants their total.
        scaled = loss * (run.mesh.dp_size / config.batch_size)
        engine.deepspeed.backward(scaled, scale_wrt_gas=False)
        total = total + loss.detach()
        if begin + size < len(units):
            engine.deepspeed.step()
    norm, applied = take_step(engine)
    run.step += 1
    run.updates += applied
    run.skipped_in_a_row = 0 if applied else run.skipped_in_a_row + 1
    return total, norm, tokens


def train(run: Run, metrics: Metrics, request: StopRequest) -> None:
    """Train until it is over; raises the ending that comes before."""
    from albert_ds.runtime.agreement import Counts, agree
    from albert_ds.runtime.health import check_health

    config = run.config
    saved_step = run.step if run.step else None
    losses, tokens, steps, started = 0.0, 0, 0, time.perf_counter()
    while not run.is_over:
        if agree(run.mesh, Counts(), stop=request.reason is not None)[1]:
            if saved_step != run.step:
                save(run)
            reason = request.reason or "another rank was asked to stop"
            raise Stopped(f"stopped after step {run.step} of {config.steps}: {reason}")
        loss, norm, count = train_step(run)
        losses, tokens, steps = losses + loss, tokens + count, steps + 1
        check_health(
            run.engine, step=run.step, skipped_in_a_row=run.skipped_in_a_row, output=config.run
        )
        if run.is_due(config.log_every):
            values = describe_window(run, losses, tokens, steps, time.perf_counter() - started)
            metrics.write(run.step, {**values, "grad_norm": norm})
            losses, tokens, steps, started = 0.0, 0, 0, time.perf_counter()
        if run.is_due(config.eval_every):
            before = time.perf_counter()
            metrics.write(run.step, evaluate(run))
            started += time.perf_counter() - before
        if run.is_due(config.save_every) and not run.skipped_in_a_row:
            save(run)
            saved_step = run.step


def describe_window(run: Run, losses, tokens: int, steps: int, seconds: float) -> dict:
    """Means since the last log line over all ranks. Collective."""
    import torch
    import torch.distributed as dist

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
    """The dev set's metrics, and the weights kept where they are the best so far. Collective."""
    from albert_ds.runtime.agreement import from_rank_0
    from albert_ds.tasks.predict import predict
    from albert_ds.tasks.table import TASKS
    from albert_ds.tuning.judge import score_splits

    task, module = run.config.task, run.engine.deepspeed.module
    outputs = {
        name: predict(module, run.splits[name].features, run.mesh, run.device)
        for name in TASKS[task].dev_splits
    }
    found = score_splits(task, run.splits, outputs) if run.mesh.rank == 0 else None
    found = from_rank_0(run.mesh, found)
    value = found[run.metric] if math.isfinite(found[run.metric]) else float("-inf")
    is_better = not run.evaluations or value > run.best[1]
    run.evaluations.append((run.step, value))
    if is_better:
        keep_best(run)
    return {f"dev_{name}": value for name, value in found.items()}


def tune(
    config: FinetuneConfig,
    splits: dict[str, Split],
    mesh: Mesh,
    device: torch.device,
    request: StopRequest,
    roll: RollCall,
    runs: list[Run],
) -> dict:
    """One run of one seed, or what it has left if it is done; returns its results. Collective.

    The run is added to `runs`, whose last one tells how far things were when they ended.
    """
    from albert_ds.runtime.agreement import from_rank_0
    from albert_ds.runtime.metrics import Metrics

    done = config.run / "results.json"
    done = from_rank_0(mesh, json.loads(done.read_text()) if done.is_file() else None)
    if done is not None:
        return done
    run = start(config, splits, mesh, device)
    runs.append(run)
    run.batches = roll.follow(run.batches)
    metrics = Metrics(config.run, mesh, run.step, num_steps=config.steps, wandb=False)
    run.evaluations = from_rank_0(mesh, read_evaluations(run) if mesh.rank == 0 else None)
    train(run, metrics, request)
    metrics.close()
    run.engine.deepspeed.destroy()
    return judge(run)


def read_evaluations(run: Run) -> list[tuple[int, float]]:
    """Those before the step that is resumed from."""
    name, found = f"dev_{run.metric}", []
    for line in (run.config.run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if name in record:
            value = record[name]
            found.append((record["step"], float("-inf") if value is None else value))
    return found


def judge(run: Run) -> dict:
    """Predict every split but train with the best weights, score, write. Collective."""
    import torch

    from albert_ds.runtime.agreement import from_rank_0
    from albert_ds.runtime.checkpoint import read_tensors
    from albert_ds.tasks.predict import predict
    from albert_ds.tuning.judge import write_results

    config = run.config
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    kinds = [kind for name, kind in half.items() if config.deepspeed.get(name, {}).get("enabled")]
    module = build_model(config, run.mesh, read_tensors(config.run / BEST / OURS))
    module = module.to(run.device, kinds[0] if kinds else torch.float32)
    outputs = {
        name: predict(module, split.features, run.mesh, run.device)
        for name, split in run.splits.items()
        if name != "train"
    }
    results = None
    if run.mesh.rank == 0:
        about = {"seed": config.seed, "best_step": run.best[0], "step": run.step}
        results = write_results(config.run, config.task, run.splits, outputs, about)
        scores = ", ".join(f"{name} {value:.4f}" for name, value in results["dev"].items())
        say(f"{config.task}, seed {config.seed}, best at step {run.best[0]}: {scores}")
    return from_rank_0(run.mesh, results)


def prepare(
    config: FinetuneConfig, args: Namespace, mesh: Mesh
) -> tuple[FinetuneConfig, dict[str, Split]]:
    """Tokenise, resolve what depends on it, and leave OUTPUT's files. Collective."""
    from albert_ds.data.vocab import read_vocab
    from albert_ds.runtime.agreement import raise_first
    from albert_ds.tuning.judge import fingerprint_splits, open_splits

    vocab = read_vocab(locate(Path(config.checkpoint))[0] / "spiece.model")
    config = replace(config, features=fingerprint_splits(config, vocab))
    splits = open_splits(config, vocab, mesh)
    config = resolve_steps(config, args, units=splits["train"].features.units)
    error = None
    if mesh.rank == 0:
        try:
            check_resume(config)
            write_run_files(config)
        except UserError as caught:
            error = caught
    raise_first(mesh, error)
    return config, splits


def main(argv: list[str]) -> int:
    world = mesh = roll = lock = None
    runs: list[Run] = []
    try:
        world = read_world()
        config, args = read_config(argv, world_size=world.size)
        request = StopRequest(config.run, config.max_hours)
        device = join_world(world, timeout_minutes=config.timeout_minutes)
        roll = RollCall(world, config.run, minutes=config.timeout_minutes)
        mesh = build_mesh(config.tensor_parallel, timeout_minutes=config.timeout_minutes + 1)
        lock = take_possession(config.run, mesh, lambda: None)
        config, splits = prepare(config, args, mesh)
        tune_seeds(config, splits, mesh, device, request, roll, runs)
        code, reason = 0, "all steps done"
    except ENDINGS as ending:
        code, reason = ending.code, str(ending)
    except (RuntimeError, OSError) as error:
        code, reason = name_failure(error, roll)
    step = runs[-1].step if runs else None
    conclude(world, mesh, lock, peek_output(argv), code=code, reason=reason, step=step, roll=roll)
    return code


def tune_seeds(
    config: FinetuneConfig,
    splits: dict[str, Split],
    mesh: Mesh,
    device: torch.device,
    request: StopRequest,
    roll: RollCall,
    runs: list[Run],
) -> None:
    """One run straight in OUTPUT, or several in OUTPUT/seed-S and what they have in common."""
    from albert_ds.tuning.judge import summarise_seeds, write_json

    if config.seeds == 1:
        tune(config, splits, mesh, device, request, roll, runs)
        return
    results = []
    for seed in range(config.seed, config.seed + config.seeds):
        output = str(config.run / f"seed-{seed}")
        one = replace(config, seed=seed, seeds=1, output=output)
        if mesh.rank == 0:
            write_run_files(one)
        results.append(tune(one, splits, mesh, device, request, roll, runs))
    summary = summarise_seeds(results)
    if mesh.rank == 0:
        write_json(config.run / "results.json", summary)
        for name, found in summary["dev"].items():
            say(
                f"{config.task} {name} over {config.seeds} seeds: median {found['median']:.4f}, "
                f"mean {found['mean']:.4f}, std {found['std']:.4f}"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
