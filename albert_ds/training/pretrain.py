"""The loop of pretraining, and what it is made of.

`train` is the loop, `run_passes` and `update` are one optimizer step, `build` makes the model and
its engine. albert_ds/train.py starts it.
"""

import time
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from shlex import quote

import torch

from albert_ds.base.cli import as_flag, log_line
from albert_ds.base.errors import DamagedData
from albert_ds.checkpoint.folder import WEIGHTS, folder_name
from albert_ds.checkpoint.gather import Saver, TrainState, open_start
from albert_ds.checkpoint.initial import read_initial_weights
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.checkpoint.origin import describe_start
from albert_ds.checkpoint.run_folder import RunLock
from albert_ds.data.micro_batch import MicroBatch
from albert_ds.data.shards import ShardSet
from albert_ds.data.stream import training_batches
from albert_ds.data.stream_config import gradient_accumulation_steps
from albert_ds.engine.deepspeed_config import has_eight_bits, precision_of
from albert_ds.engine.engine import Engine, build_engine, check_head_width
from albert_ds.engine.graphs import GraphedForPretraining, Graphs, use_own_stream
from albert_ds.model import fused
from albert_ds.model.albert import PER
from albert_ds.model.per_layer import find_unused_parameters
from albert_ds.model.shapes import build_shapes, count_params
from albert_ds.model.teacher import Teacher
from albert_ds.parallel.consensus import Counts, agree, from_rank_0, raise_together
from albert_ds.parallel.mesh import Mesh
from albert_ds.parallel.random import seed_step
from albert_ds.process.stop_request import StopRequest
from albert_ds.settings.pretrain import Opened, RunConfig, check_start
from albert_ds.settings.shared import read_previous, write_config
from albert_ds.training import heldout
from albert_ds.training.metrics import Metrics, Window, cut_back, last_counts
from albert_ds.training.run import TrainingRun, cut_model, go_on
from albert_ds.training.screen import print_facts, print_header


@dataclass(kw_only=True, slots=True)
class Run(TrainingRun):
    """Everything a step needs."""

    config: RunConfig
    batches: Iterator[MicroBatch]
    window: Window
    heldout: list[MicroBatch] = field(default_factory=list)  # this rank's held-out data
    is_evaluated: bool = False  # the checkpoint that it has resumed
    span: Callable[[str], AbstractContextManager] = nullcontext  # around each named part of a step
    counted: dict[str, int] = field(default_factory=dict)  # of the finished steps, for save_at

    @property
    def milestones(self) -> int:
        """How many of --save-at-tokens and --save-at-words are reached."""
        wanted = self.config.save_at.items()
        return sum(bisect(numbers, self.counted[name]) for name, numbers in wanted)

    def count(self, batch: "Batch") -> None:
        """Add what a step has seen."""
        for name in self.counted:
            self.counted[name] += getattr(batch.counts, name)

    def find_unused_parameters(self) -> set[str]:
        """The parameters of layers that the step after `step` finished ones does not run."""
        model = self.config.model
        depth = self.config.model_at(self.step).num_layers
        return find_unused_parameters(self.engine.shapes, model.running_layers(depth))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's micro-batches of one step, and what all ranks agreed on before it."""

    micro_batches: list[MicroBatch]
    counts: Counts  # of the global batch
    stop: bool  # a rank was asked to stop
    error: DamagedData | None = None  # raised where the batch is used


def build(
    config: RunConfig, mesh: Mesh, device: torch.device, weights: dict | None = None
) -> Engine:
    """Build the model, cut it for tensor parallelism, and wrap it in an engine. Collective.

    `weights` (whole fp32 tensors by name) replace the initialisation from the seed.
    """
    with torch.device("meta" if weights else "cpu"):
        model = GraphedForPretraining(
            config.model,
            seed=config.seed,
            activation_checkpointing=config.activation_checkpointing,
            exits=config.exits,
            z_loss=config.z_loss,
        )
    model.albert.encoder.eight_bits = has_eight_bits(config.deepspeed)
    if weights:
        model.load_state_dict(weights, assign=True)
    cut_model(model, mesh)
    is_graphed = find_obstacle(config, mesh, device) is None
    fused.MIN_TRITON_ELEMENTS = (
        0 if is_graphed else fused.DEFAULT_MIN_TRITON_ELEMENTS
    )  # in a graph a launch costs the host nothing
    if is_graphed:
        use_own_stream(device)
    engine = build_engine(model.to(device), mesh, config.deepspeed, average=config.average)
    if is_graphed and not config.no_graphs:
        engine.deepspeed.module.graphs = Graphs(engine.deepspeed.module)
    return engine


def find_obstacle(config: RunConfig, mesh: Mesh, device: torch.device) -> str | None:
    """What keeps a run's micro-batches from running by CUDA graphs; None if nothing does."""
    precision = precision_of(config.deepspeed)
    stage = config.deepspeed.get("zero_optimization", {}).get("stage", 0)
    if device.type != "cuda":
        return device.type
    if precision != "bf16":
        return precision
    if has_eight_bits(config.deepspeed):
        return "fp8"
    if mesh.tp_size > 1:
        return f"--tensor-parallel {mesh.tp_size}"
    if stage == 3:
        return "ZeRO-3"
    if config.activation_checkpointing != "none":
        return f"--activation-checkpointing {config.activation_checkpointing}"
    return None


def has_fixed_shapes(config: RunConfig, mesh: Mesh, device: torch.device) -> bool:
    """Whether a run's micro-batches are padded to few shapes.

    Where CUDA graphs may run them, and with --no-graphs too: its numbers are the same. On a CPU in
    bf16 too, but for tensor parallelism: ranks send the rows, and more of them cost more.
    """
    if device.type == "cpu":
        return precision_of(config.deepspeed) == "bf16" and mesh.tp_size == 1
    return find_obstacle(config, mesh, device) is None


def next_batch(run: Run, *, ahead: int = 0, stop: bool = False) -> Batch:
    """Take the next global batch, of the step that is `ahead` of the run's. Collective.

    Every rank learns whether any rank was asked to stop or found damaged data.
    """
    config = run.config
    started = time.perf_counter()
    error = None
    micro_batches: list[MicroBatch] = []
    size = config.plan.schedule("batch_size").at(run.step + ahead)
    accumulation = gradient_accumulation_steps(size, config.micro_batch_size, run.mesh.dp_size)
    try:
        with run.span("data_wait"):
            micro_batches = [next(run.batches) for _ in range(accumulation)]
    except DamagedData as caught:
        error = caught
    run.window.data_seconds += time.perf_counter() - started
    own = sum((Counts.of(batch) for batch in micro_batches), Counts())
    try:
        counts, stop = agree(run.mesh, own, stop=stop, error=error)
    except DamagedData as damage:  # on any rank
        return Batch(micro_batches=[], counts=Counts(), stop=False, error=damage)
    return Batch(micro_batches=micro_batches, counts=counts, stop=stop)


def train_step(run: Run, batch: Batch) -> float:
    """One optimizer step over the global batch; returns the gradient norm before clipping."""
    run_passes(run, batch)
    return update(run, batch)


def run_passes(run: Run, batch: Batch) -> None:
    """The gradients of the global batch. On CUDA they are still being computed on return.

    Losses are normalised over the GLOBAL batch, so that the update does not depend on how the
    batch is cut into ranks and micro-batches. Raises DamagedData on every rank if one rank
    found damaged data in this batch.
    """
    if batch.error is not None:
        raise batch.error
    engine = run.engine
    seed_step(run.config.seed, run.step, run.mesh.dp_rank)
    engine.set_learning_rate(run.config.rate_at(run.step))
    depth = run.config.model_at(run.step).num_layers
    engine.deepspeed.module.albert.encoder.set_depth(depth)
    if run.find_unused_parameters():
        engine.clear_gradients()
    # DeepSpeed averages gradients over data-parallel ranks; the losses need their sum.
    counted = [getattr(batch.counts, name) for name in PER]
    # On the device, because a graph repeats the numbers of its launches; without a copy.
    factors = [run.mesh.dp_size / max(number, 1) for number in counted]
    scales = torch.stack([torch.full((), x, device=run.device) for x in factors])
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        with run.span("forward"):
            outputs = engine.deepspeed(
                **micro_batch.on(run.device), scales=scales, overflows=micro_batch.overflows
            )
        with run.span("backward"):
            engine.backward(outputs["loss"], is_last=number == len(batch.micro_batches))
        run.window.add_outputs(outputs)


def update(run: Run, batch: Batch) -> float:
    """Update the weights after the passes; returns the gradient norm before clipping."""
    with run.span("optimizer"):
        gradient_norm, applied = run.engine.take_step(run.find_unused_parameters())
    model = run.config.model_at(run.step)
    heads = run.config.count_heads(model.num_layers)
    run.window.add_step(batch.counts, model, heads=heads, applied=applied)
    run.count_step(applied=applied)
    run.count(batch)
    if applied:
        run.engine.update_average(run.updates)
    return gradient_norm


def train(run: Run, request: StopRequest) -> None:
    """Train to the last step. Raises Stopped, Diverged, DamagedData or MachineFailed before it."""
    config = run.config
    saver = Saver(
        run.engine,
        config.run,
        keep_last=config.keep_last,
        keep_every=1 if config.save_at else config.keep_every,
        keep_step=config.plateau_end,
        lock=run.lock,
        resumed_at=run.step,
    )
    metrics = Metrics(
        config.run,
        run.mesh,
        run.step,
        num_steps=config.steps,
        work_of=config.work_of,
        wandb=config.wandb,
    )

    def fetch(step: int) -> Batch | None:
        if step == config.steps:
            return None
        return next_batch(run, ahead=step - run.step, stop=request.reason is not None)

    # It ended between the checkpoint and its evaluation.
    if run.step and run.is_due(config.eval_every) and not run.is_evaluated:
        metrics.write(run.step, evaluate(run))
    upcoming = fetch(run.step)
    saved = run.milestones
    run.window.reset()  # each step from here on fetches the batch of the next
    while batch := upcoming:
        # After a skipped step the weights may have diverged: a stop waits for a step that is not.
        if batch.stop and not run.skipped_in_a_row:
            save(run, saver)
            saver.wait()
            raise run.stopped(request)
        run_passes(run, batch)
        upcoming = fetch(run.step + 1)  # while the device computes
        gradient_norm = update(run, batch)
        metrics.advance(run.step)
        run.check_health()
        is_milestone = run.milestones > saved  # which export finds by its line
        if run.is_due(config.log_every) or is_milestone:
            values = describe_window(run, gradient_norm)
            metrics.write(run.step, values)
            if run.step == config.steps and run.skipped_in_a_row and not isfinite(values["loss"]):
                saver.wait()
                raise run.diverged()
        # No checkpoint is written while steps are skipped, so the newest one is a good one.
        is_due = run.is_due(config.save_every) or is_milestone
        is_due |= run.step == config.plateau_end
        if run.step == config.steps or (is_due and not run.skipped_in_a_row):
            save(run, saver)
            saved = run.milestones
        if run.is_due(config.eval_every):  # after the checkpoint: whatever ends it costs no step
            metrics.write(run.step, evaluate(run))
    saver.wait()
    metrics.close()


def prepare(
    config: RunConfig,
    opened: Opened,
    mesh: Mesh,
    device: torch.device,
    lock: RunLock | None = None,
) -> Run:
    """Do all that comes before the first step. Collective."""
    engine, state = start(config, mesh, device, opened.initial)
    if state.step == 0 and opened.initial is not None and mesh.rank == 0:
        languages = {source.folder: source.language for source in opened.sources}
        has_pairs = config.model.pair_head
        for line in describe_start(opened.initial, languages, pair_head=has_pairs):
            log_line(line)
    if opened.teacher is not None:
        assert config.teacher_weight
        take_teacher(engine, opened.teacher, config.teacher_weight)
    records: list[dict] = []
    with raise_together(mesh):
        if mesh.rank == 0:
            records = cut_back(config.run, state.step)
    is_evaluated = any(r["step"] == state.step and "heldout_loss" in r for r in records)
    is_evaluated = from_rank_0(mesh, is_evaluated)
    begin = state.step
    counted = {}
    if config.save_at:
        begin, counted = from_rank_0(mesh, last_counts(records, config.save_at))
    run = Run(
        config=config,
        mesh=mesh,
        device=device,
        engine=engine,
        batches=open_stream(config, opened.sources, mesh, begin, device),
        window=Window(device),
        lock=lock,
        is_evaluated=is_evaluated,
        step=begin,
        updates=state.updates,
        counted=counted,
        # Now, though the first evaluation comes later: a damaged shard must not end a long run.
        heldout=heldout.read_batches(
            opened.heldout,
            config.plan.stream_at(config.steps),
            limit=config.eval_samples,
            micro_batch_size=config.micro_batch_size,
            mesh=mesh,
            fixed_shapes=has_fixed_shapes(config, mesh, device),
        ),
    )
    while run.step < state.step:  # since the last line of metrics.jsonl; drawn again, to be counted
        batch = next_batch(run)
        if batch.error is not None:
            raise batch.error
        run.step += 1
        run.count(batch)
    return run


def start(
    config: RunConfig, mesh: Mesh, device: torch.device, initial: ModelFolder | None
) -> tuple[Engine, TrainState]:
    """Build the engine from the first of these that exists. Collective.

    1. The newest complete checkpoint of RUN: weights and optimizer.
    2. `initial`, that of --init-from: its weights, a fresh optimizer, step 0.
    3. The initialisation from --seed.
    """
    checkpoint = open_start(config.run, mesh, build_shapes(config.model))
    weights = None
    if checkpoint is not None:
        weights = checkpoint.read(WEIGHTS)
    elif initial is not None:
        weights = read_initial_weights(initial, config.model, config.seed)
    engine = build(config, mesh, device, weights)
    return engine, go_on(config, engine, checkpoint)


def take_teacher(engine: Engine, folder: ModelFolder, weight: float) -> None:
    """Give the engine's model a teacher, whole on every rank, in the type of the model's passes."""
    module = engine.deepspeed.module
    dtype = next(module.parameters()).dtype
    module.teacher = Teacher(folder.build_model().to(engine.deepspeed.device, dtype), weight)
    if dtype != torch.float32:
        check_head_width(module.teacher.model, f"--teacher {folder.path}: its ")


def write_run_files(config: RunConfig, opened: Opened) -> None:
    """RUN/config.json, and the vocabulary, so that an export needs nothing but RUN."""
    # Another start may have written RUN/config.json since the command line was read.
    previous = read_previous(config.run)
    check_start(config, previous, opened.ds_config)
    # What a resumed run has started from may be gone, or may have gone on.
    length = (previous or {}).get("trained_length")
    if length is None:
        before = opened.initial.trained_length if opened.initial else 0
        length = max(before, config.stream.sequence_length)  # --sequence-length may grow
    vocab = opened.sources[0].vocab
    write_config(config, vocab_sha256=vocab.sha256, trained_length=length)
    vocab.write(config.run)


def open_stream(
    config: RunConfig, sources: list[ShardSet], mesh: Mesh, step: int, device: torch.device
) -> Iterator[MicroBatch]:
    """This rank's endless micro-batches, after `step` finished steps."""
    return training_batches(
        sources,
        config.data_weights,
        config.plan,
        step=step,
        micro_batch_size=config.micro_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        num_workers=config.num_workers or 0,
        timeout=60 * config.timeout_minutes,
        pin_memory=device.type == "cuda",
        fixed_shapes=has_fixed_shapes(config, mesh, device),
    )


def describe_window(run: Run, gradient_norm: float) -> dict:
    """The metrics of a logging interval. Collective."""
    values = run.window.close(run.mesh, run.config.stream.objective)
    if run.config.depth_schedule:
        values["num_layers"] = run.config.model_at(run.step - 1).num_layers
    if run.config.exits:
        values.setdefault("exit_loss", None)  # no step was as deep as an exit
    plan = run.config.plan
    graphs = run.engine.deepspeed.module.graphs
    return {
        "samples": plan.samples_at(run.step),
        **run.counted,
        **{name: plan.schedule(name).at(run.step - 1) for name in plan.schedules},
        **values,
        **(graphs.take_counts() if graphs is not None else {}),
        "lr": run.config.rate_at(run.step - 1),
        "grad_norm": gradient_norm,
    }


def evaluate(run: Run) -> dict:
    """Metrics on the held-out sequences of the first DATA folder. Collective."""
    config = run.config
    with run.window.paused():
        module = run.engine.deepspeed.module
        objective = config.stream.objective
        depths = config.schedule("depth_schedule").at(run.step - 1)
        module.albert.encoder.set_depth(max(depths))  # of those that may be drawn
        return heldout.evaluate(module, run.heldout, run.mesh, run.device, objective)


def save(run: Run, saver: Saver) -> None:
    """Start writing a checkpoint of the current state. Collective."""
    with run.window.paused():
        run.save(saver)


def print_start(run: Run, opened: Opened) -> None:
    """Show what is trained on what. Collective."""
    config = run.config
    facts = {}
    sources = []
    for folder, weight, source in zip(
        config.data, config.data_weights, opened.sources, strict=True
    ):
        epochs = config.samples_at(config.steps) * weight / source.sizes.sum()
        sources.append(
            f"{folder}: {source.documents:,} documents, {source.tokens:,} tokens; "
            f"{config.steps:,} steps are {epochs:.3g} epochs"
        )
    if run.device.type == "cuda":
        why = find_obstacle(config, run.mesh, run.device) or "--no-graphs" * config.no_graphs
        facts["launches"] = f"one by one, not by CUDA graphs: {why}" if why else "by CUDA graphs"
    if opened.teacher is not None:
        size = sum(count_params(opened.teacher.config).values())
        weight = f"weight {config.teacher_weight:g}"
        facts["teacher"] = f"{opened.teacher.name}, {size:,} parameters, {weight}"
    elif config.teacher is not None:
        facts["teacher"] = "none, as --teacher-weight is 0"
    if config.schedules:
        facts["schedules"] = "; ".join(f"{as_flag(k)} {v}" for k, v in config.schedules.items())
    print_header(run, "pretraining", config.size, facts | {"data": "; ".join(sources)})


def print_results(config: RunConfig) -> None:
    """Show what the run has written, and commands that use it."""
    run = quote(config.output)
    data = quote(config.data[0])
    facts = {
        "weights": str(config.run / "checkpoints" / folder_name(config.steps)),
        "curves": f"tensorboard --logdir {run}",
        "evaluate": f"albert-ds probe --checkpoint {run} --data {data}",
        "export": f"albert-ds export --checkpoint {run} --output {run}-hf",
    }
    print_facts(f"done: {config.output}", facts)
