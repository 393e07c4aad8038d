"""The command line of pretraining -> one checked `RunConfig`.

Everything that can be wrong with what the user typed is found here, before a rank starts work and
before anything is written. Nothing heavy is imported at the top: `--help` answers at once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.files import RUN_MARKS, RUN_NAMES, check_folder
from albert_ds.base.schedules import (
    EXPLANATION,
    SHAPES,
    Schedule,
    cut,
    learning_rate,
    plateau_end,
    read_counts,
)
from albert_ds.checkpoint.folder import list_checkpoints, step_of
from albert_ds.data.stream_config import (
    TASK,
    VARYING,
    DataPlan,
    StreamConfig,
    gradient_accumulation_steps,
    read_varying,
    task,
)
from albert_ds.model.config import SHAPE, SIZES, ModelConfig, count_flops
from albert_ds.model.depth import draw_depth, read_depths, read_exits
from albert_ds.model.sharing import ADDITIONS, list_patterns
from albert_ds.settings.config_file import CONFIG, parse
from albert_ds.settings.models import check_teacher, open_initial, open_teacher, resolve_model
from albert_ds.settings.shared import (
    EPOCHS,
    LAYOUT,
    LEARNING_RATE,
    OPTIMIZATION,
    RHYTHM,
    WHAT,
    SharedConfig,
    SharedOpened,
    check_resume,
    join_command,
    layout,
    optimization,
    read_previous,
    resolve_deepspeed,
    resolve_warmup,
    rhythm,
    take_plugin,
    what,
)

if TYPE_CHECKING:
    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.data.shards import ShardSet

DEFAULT_LEARNING_RATE = 0.00176  # the paper's, for a batch of 4096
WARMUP_FRACTION = 0.025  # the release's 3,125 of 125,000
COOLDOWN = 0.2  # share of the steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(SharedConfig):
    """Every value that decides a pretraining run, resolved."""

    # By field, of those of VARYING that change; the field itself has the first step's value.
    schedules: dict[str, str] = field(default_factory=dict)
    size: str = what(
        "size of the model, as in the paper's Table 1",
        choices=SIZES,
        name="--model",
        shown_default="that of --init-from",
    )
    stream: StreamConfig
    data: list[str] = what(
        "folders of shards, made by `albert-ds shards`",
        "DATA",
        cli.path,
        nargs="+",
        may_change=True,
    )
    data_sha256: list[str]  # identifies the content of each DATA, wherever it lies
    data_weights: list[float] = task(
        "weight of each DATA in the samples; config.json holds them scaled to a sum of 1",
        "WEIGHT",
        cli.Range(gt=0, le=1e9),
        shown_default="its size",
        nargs="+",
    )
    activation_checkpointing: str = layout(
        "activations that the backward pass recomputes instead of storing",
        default="none",
        choices=("none", "attention", "block"),
    )
    no_graphs: bool = layout(
        "on CUDA: launch every kernel of a micro-batch by itself, not by CUDA graphs; the numbers "
        "are the same",
        default=False,
    )
    num_workers: int | None = layout(  # resolved once the device is known
        "data loader processes of a rank; 0: the trainer itself loads",
        "PROCESSES",
        cli.integer(0, 1024),
        default=None,
        shown_default="2 on CUDA, else 0",
    )
    init_from: str | None = optimization(
        "start from the weights of a run or of a Hugging Face folder. A layer takes the blocks of "
        "the layer at the same relative depth, so depth may differ and fewer layers may share",
        "RUN_OR_HF",
        cli.path,
        default=None,
        shown_default="random weights",
    )
    learning_rate_schedule: str = optimization(
        "how the rate falls after the warm-up: on a line, on half a cosine, or (wsd) only in the "
        "last steps; the checkpoint before these is kept, and more --steps prolong a copy of it",
        default="linear",
        choices=SHAPES,
    )
    final_rate: float = optimization(
        "learning rate at the end, as a share of --learning-rate",
        "SHARE",
        cli.Range(ge=0, le=1),
        default=0.0,
    )
    cooldown: float | None = optimization(
        "share of --steps at the end in which the rate falls, with wsd",
        "SHARE",
        cli.Range(ge=0, le=1),
        default=None,
        shown_default=f"{COOLDOWN} with wsd",
        may_change=True,
    )
    depth_schedule: str | None = optimization(
        "layers to run, and from which step or share of --steps on: 3@0,6@40%,12@70%; 2-6@0 draws "
        "them for each step. Depths that use the same blocks",
        "LAYERS@START,...",
        default=None,
        shown_default="all layers from the first step on",
        may_change=True,
    )
    exit_losses: str | None = optimization(
        "layers after which the MLM loss counts as well, and its weight, 1 if left out as it is "
        "after the last layer: 2,4:0.5",
        "LAYER:WEIGHT,...",
        default=None,
        shown_default="the last layer alone",
    )
    z_loss: float = optimization(
        "weight of log(Z)^2 in the last layer's MLM loss, Z what softmax divides by, such as 1e-4",
        "WEIGHT",
        cli.Range(ge=0, le=1),
        default=0.0,
    )
    teacher: str | None = optimization(
        "learn the scores of this model too: a run, a checkpoint or a Hugging Face folder with the "
        "vocabulary of DATA; of a run the weights, not their --average, which `export --average` "
        "writes",
        "RUN_OR_HF",
        cli.path,
        default=None,
        shown_default="no teacher",
        may_change=True,
    )
    teacher_crc32: int | None = None  # of its weights, wherever they lie
    teacher_weight: float | None = optimization(
        "weight of the divergence from --teacher, beside the MLM loss",
        "WEIGHT",
        cli.Range(ge=0, le=1000),
        default=None,
        shown_default="1 with --teacher",
    )
    average: float | None = optimization(
        "keep an exponential moving average (EMA) of the weights with this decay, such as 0.999; "
        "probe, export, finetune and fill-mask read it",
        "DECAY",
        cli.Range(gt=0, lt=1),
        default=None,
        shown_default="no average",
    )
    seed: int = 0  # StreamConfig's
    eval_samples: int = rhythm(
        "held-out samples of an evaluation, at most",
        "SAMPLES",
        cli.positive,
        default=4096,
        may_change=False,
    )
    keep_last: int = rhythm(
        "number of newest checkpoints to keep", "CHECKPOINTS", cli.positive, default=3
    )
    keep_every: int | None = rhythm(
        "keep the checkpoint of every multiple of this many steps as well",
        "STEPS",
        cli.positive,
        default=None,
        shown_default="none of them",
    )
    save_at_tokens: list[int] | None = rhythm(
        "save a checkpoint at these numbers of tokens as well, such as 500k,1M,2.5M; all "
        "checkpoints are then kept",
        "TOKENS,...",
        read_counts,
        default=None,
        shown_default="none",
    )
    save_at_words: list[int] | None = rhythm(
        "the same for words of the text, as the samples hold them; export "
        "--revision-per-checkpoint calls these checkpoints chck_1M and so on",
        "WORDS,...",
        read_counts,
        default=None,
        shown_default="none",
    )
    wandb: bool = rhythm("log to Weights & Biases as well", default=False)

    @property
    def save_at(self) -> dict[str, list[int]]:
        """What is counted to save a checkpoint at, and the numbers at which it is."""
        wanted = {"tokens": self.save_at_tokens, "words": self.save_at_words}
        return {name: sorted(numbers) for name, numbers in wanted.items() if numbers}

    def model_at(self, step: int) -> ModelConfig:
        """The model as the step after `step` finished ones runs it: --depth-schedule."""
        depths = self.schedule("depth_schedule").at(step)
        return self.model.at_depth(draw_depth(depths, self.seed, step))

    @property
    def exits(self) -> dict[int, float]:
        """Layers after which the MLM loss counts as well, and its weight there."""
        return read_exits(self.model, self.exit_losses)

    @property
    def plan(self) -> DataPlan:
        return DataPlan(
            batch_size=self.batch_size,
            stream=self.stream,
            schedules=self.schedules,
            steps=self.steps,
        )

    def samples_at(self, step: int) -> int:
        return self.plan.samples_at(step)

    def rate_at(self, step: int) -> float:
        return learning_rate(
            step,
            peak=self.learning_rate,
            warmup_steps=self.warmup_steps,
            num_steps=self.steps,
            shape=self.learning_rate_schedule,
            final=self.final_rate,
            cooldown=COOLDOWN if self.cooldown is None else self.cooldown,
        )

    @property
    def plateau_end(self) -> int | None:
        """The last step whose checkpoint a longer run may go on from, with wsd."""
        if self.learning_rate_schedule != "wsd":
            return None
        return plateau_end(self.steps, COOLDOWN if self.cooldown is None else self.cooldown)

    def schedule(self, name: str) -> Schedule:
        """The schedule of a field of VARYING, or of the layers: "depth_schedule"."""
        if name == "depth_schedule":
            return read_depths(self.model, self.depth_schedule, self.steps)
        return self.plan.schedule(name)

    def count_heads(self, num_layers: int) -> int:
        """The depths of a step at which its MLM loss is computed."""
        return 1 + sum(layer < num_layers for layer in self.exits)

    def work_of(self, step: int) -> float:
        """FLOPs of the first `step` steps, at full length; of drawn depths the mean."""
        schedules = [self.schedule(name) for name in ("depth_schedule", *VARYING)]
        total = 0.0
        for begin, steps in cut(schedules, step):
            depths, size, length, masked = (each.at(begin + steps // 2) for each in schedules)
            count = partial(count_flops, tokens=length, squared_lengths=length**2)
            masked = round(masked * length)
            flops = fmean(
                count(self.model.at_depth(d), masked=masked * self.count_heads(d)) for d in depths
            )
            total += flops * size * steps
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened(SharedOpened):
    """What the command line of pretraining names."""

    sources: list[ShardSet]  # the training set of each DATA
    heldout: ShardSet | None  # of the first DATA, if any was held out

    @property
    def initial(self) -> ModelFolder | None:
        """The model of --init-from. None too if it is gone since the run was saved."""
        return self.models.get("--init-from")

    @property
    def teacher(self) -> ModelFolder | None:
        """The model of --teacher, if there is one; a resumed run has it too."""
        return self.models.get("--teacher")


def build_parser() -> cli.Parser:
    """The parser of train.py, from the fields that the flags fill."""
    parser = cli.Parser(
        description="Pretrain ALBERT (or a BERT baseline). Given the same --output again, resumes.",
        epilog=f"{_describe_layers()}\n{EXPLANATION}",
    )
    for title in (WHAT, SHAPE, TASK, OPTIMIZATION, LAYOUT, RHYTHM):
        parser.add_argument_group(title)
    declared = cli.flags_of(RunConfig) | cli.flags_of(StreamConfig)
    varying = {
        name: replace(declared[name], type=kind, help=f"{declared[name].help}; or a schedule")
        for name, kind in VARYING.items()
    }
    cli.add_flags(parser, RunConfig, instead=varying)
    cli.add_flags(parser, ModelConfig, suppress=True)
    cli.add_flags(parser, StreamConfig, instead=varying)
    shown = f"{DEFAULT_LEARNING_RATE}, the paper's"
    cli.add_flag(parser, "learning_rate", replace(LEARNING_RATE, shown_default=shown))
    cli.add_flag(parser, "config", CONFIG)
    cli.add_instead(parser, "steps", "epochs", replace(EPOCHS, group=WHAT))
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser


def _describe_layers() -> str:
    """The tables of --sharing and --per-layer, for --help."""
    lines = ["--sharing, with the blocks (attention / feed-forward) of 6 layers:"]
    for form, blocks, meaning in list_patterns():
        lines += [f"  {form:15} {meaning}", f"  {'':15} {blocks}"]
    lines.append("--per-layer, any of these with commas between, or none:")
    lines += [f"  {addition.form:15} {addition.meaning}" for addition in ADDITIONS.values()]
    return "\n".join(lines) + "\n"


def read_config(argv: list[str], *, world_size: int) -> tuple[RunConfig, Opened]:
    """Parse and check a command line; raise UserError for the first thing that is wrong.

    Returns what was opened with the configuration: the rest of the run opens nothing of it again.
    """
    before = read_previous(cli.peek_output(argv))
    plugin_sha256 = take_plugin(argv, before)  # it may add to what the flags allow
    args = parse(build_parser(), argv, RunConfig)
    from albert_ds.data.shards import open_data

    sources, heldout = open_data(args.data, needs_words=bool(args.save_at_words))
    args.steps = _resolve_steps(args, sources)
    schedules = _take_schedules(args)
    initial = open_initial(args)
    model = resolve_model(args, sources, initial, before)
    weights = _resolve_weights(args, sources)
    built = min(source.sequence_length for source in sources)
    args.sequence_length = args.sequence_length or min(built, model.max_position_embeddings)
    stream = StreamConfig(**cli.values_of(args, StreamConfig))
    micro, ds_config, deepspeed = resolve_deepspeed(
        args, model, world_size=world_size, default_learning_rate=DEFAULT_LEARNING_RATE
    )
    if initial is not None:
        from albert_ds.checkpoint.initial import find_origins

        find_origins(initial, model)
        initial.check_vocab(sources[0].vocab, f"--init-from {args.init_from}")
    teacher = open_teacher(args)
    if args.wandb:
        cli.require("wandb", "wandb", "--wandb")
    if args.cooldown is not None and args.learning_rate_schedule != "wsd":
        raise UserError("--cooldown: only with --learning-rate-schedule wsd")
    warmup = round(WARMUP_FRACTION * args.steps)
    if before is not None:  # what it was started with, though it may now end in its warm-up
        warmup = before.get("warmup_steps", warmup)
    inputs = [*args.data, *filter(None, [args.init_from, args.teacher])]
    check_folder(Path(args.output), inputs, names=RUN_NAMES, marks=RUN_MARKS)
    resolved: dict[str, Any] = {
        "plugin_sha256": plugin_sha256,
        "command": join_command("train", argv),
        "size": args.size or args.init_from,
        "model": model,
        "schedules": schedules,
        "teacher_crc32": None if teacher is None else teacher.checksum,
        "stream": stream,
        "seed": stream.seed,
        "data_weights": weights,
        "data_sha256": [source.fingerprint for source in sources],
        "micro_batch_size": micro,
        "warmup_steps": resolve_warmup(args.warmup_steps, args.steps, warmup),
        "deepspeed": deepspeed,
    }
    config = RunConfig(**cli.values_of(args, RunConfig) | resolved)
    _check_schedules(config, built, world_size // config.tensor_parallel)
    longest = max(config.plan.schedule("sequence_length").values)
    check_teacher(teacher, sources[0].vocab, longest)
    check_start(config, before, ds_config)
    named = {"--init-from": initial, "--teacher": teacher}
    models = {name: folder for name, folder in named.items() if folder is not None}
    return config, Opened(ds_config=ds_config, models=models, sources=sources, heldout=heldout)


def _resolve_steps(args, sources) -> int:
    """--steps, or those in which every sample of all DATA is seen --epochs times."""
    if args.epochs is None:
        return args.steps
    sizes = [float(source.sizes.sum()) for source in sources]
    samples = sum(sizes)
    weights = args.data_weights or sizes
    shares = [
        weight / sum(weights) - size / samples for weight, size in zip(weights, sizes, strict=False)
    ]
    if isinstance(args.batch_size, str) or max(map(abs, shares)) > 1e-9:
        raise UserError(
            "--epochs: not with a schedule of --batch-size, nor with --data-weights other than the "
            "sizes of DATA"
        )
    return max(1, ceil(args.epochs * samples / args.batch_size))


def _take_schedules(args) -> dict[str, str]:
    """Those that were typed, by field; `args` then has the values of the first step."""
    schedules = {name: v for name in VARYING if isinstance(v := getattr(args, name), str)}
    for name, text in schedules.items():
        setattr(args, name, read_varying(name, text, args.steps).at(0))
    return schedules


def _check_schedules(config: RunConfig, built: int, ranks: int) -> None:
    """Raise UserError for a wrong one; `built`: tokens of the longest sequence in the shards."""
    config.model_at(0), config.exits  # refuse a wrong --depth-schedule and --exit-losses
    for size in config.plan.schedule("batch_size").values:
        gradient_accumulation_steps(size, config.micro_batch_size, ranks)
    longest = config.model.max_position_embeddings
    for length in config.plan.schedule("sequence_length").values:
        if length > built:
            raise UserError(f"--sequence-length {length}: the shards hold at most {built}")
        if length > longest:
            raise UserError(f"--sequence-length {length}: --max-position-embeddings is {longest}")


def resolve_workers(config: RunConfig, device_type: str) -> RunConfig:
    """`config` with the number of loader processes that suits the device, where none was typed."""
    if config.num_workers is not None:
        return config
    return replace(config, num_workers=2 if device_type == "cuda" else 0)


def _resolve_weights(args, sources) -> list[float]:
    weights = args.data_weights
    if weights is None:
        weights = [float(source.sizes.sum()) for source in sources]
    if len(weights) != len(sources):
        raise UserError(
            f"--data-weights: {len(weights)} numbers for {len(sources)} --data; allowed: one each"
        )
    return [weight / sum(weights) for weight in weights]


def check_start(config: RunConfig, before: dict | None, ds_config: dict) -> None:
    """`check_resume`; raise UserError also for a value that a step done had otherwise."""
    check_resume(config, before, ds_config)
    folder = config.run / "checkpoints"
    checkpoints = list_checkpoints(folder) if folder.is_dir() else []
    if before is None or not checkpoints:
        return
    done = step_of(checkpoints[0])
    plan = DataPlan.read(before, config.output)
    if config.steps < done:
        raise UserError(
            f"--steps {config.steps}: {config.output} has done {done}; allowed: at least as many"
        )
    depths = read_depths(config.model, before.get("depth_schedule"), plan.steps)
    earlier = {**{name: plan.schedule(name) for name in VARYING}, "depth_schedule": depths}
    for name, old in earlier.items():
        new = config.schedule(name)
        for step in range(done if old != new else 0):
            if old.at(step) != new.at(step):
                raise UserError(
                    f"{cli.as_flag(name)}: {new.at(step)} in step {step + 1}, which "
                    f"{config.output} has done with {old.at(step)}; allowed: other values after "
                    f"step {done}"
                )
