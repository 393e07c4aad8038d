"""The command line of fine-tuning -> one checked `FinetuneConfig`.

What is not typed comes from the task's recipe (tasks/recipes.py). Nothing heavy is imported at the
top: `--help` answers at once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from albert_ds.base import cli
from albert_ds.base.errors import UserError
from albert_ds.base.files import PACKAGE, RUN_MARKS, RUN_NAMES, check_folder
from albert_ds.base.json_files import check, read_json
from albert_ds.engine.deepspeed_config import has_eight_bits
from albert_ds.model.config import ModelConfig
from albert_ds.settings.config_file import CONFIG, parse
from albert_ds.settings.shared import (
    EPOCHS,
    LAYOUT,
    LEARNING_RATE,
    RHYTHM,
    WHAT,
    SharedConfig,
    SharedOpened,
    check_resume,
    join_command,
    read_previous,
    resolve_deepspeed,
    resolve_warmup,
    take_plugin,
    what,
)
from albert_ds.tasks.recipes import RECIPES, SHORTEST, Lengths, Recipe

if TYPE_CHECKING:
    from albert_ds.checkpoint.model_folder import ModelFolder
    from albert_ds.model.task_heads import HeadConfig
    from albert_ds.tasks.registry import Task

DS_CONFIG = PACKAGE / "ds_configs" / "zero1_fp32_adamw.json"
EVALUATIONS = 10  # of the dev set in a run, unless --eval-every says otherwise
START = "where to start"
SETTINGS = "settings"
start, setting = partial(cli.flag, group=START), partial(cli.flag, group=SETTINGS)
BY_TASK = "that of the task"
NARROWEST = 768  # hidden size of ALBERT-base, the narrowest model that rates were published for
HIGHEST = 1e-3  # learning rate by default
SHARED = cli.flags_of(SharedConfig)
# They fill parts of fields.
PARTS = {
    "learning_rate": replace(
        LEARNING_RATE,
        shown_default=f"{BY_TASK}; times ({NARROWEST} / H)^2, to {HIGHEST:g}, if H < {NARROWEST}",
        group=SETTINGS,
    ),
    "dropout": replace(
        cli.flags_of(ModelConfig)["dropout"],
        help="probability of dropout, in ALBERT and before the task's head",
        shown_default=BY_TASK,
        group=SETTINGS,
    ),
    "sequence_length": replace(
        cli.flags_of(Lengths)["sequence"], shown_default=BY_TASK, group=SETTINGS
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig(SharedConfig):
    """Every value that decides a fine-tuning run, resolved."""

    task: str = what("task to learn", choices=RECIPES)
    data: str = what(
        "folder with the task's files as published: {train,dev,test}.tsv; "
        "{train,dev}-{v1.1,v2.0}.json; {train,dev,test}/{middle,high}/*.txt; or with labels of "
        "your own: {train,dev,test}.{csv,tsv,jsonl} for text, .{conll,txt,jsonl} for tokens",
        "TASKDIR",
        cli.path,
        may_change=True,
    )
    checkpoint: str = what(
        "pretrained run, converted checkpoint or Hugging Face folder: vocabulary and encoder to "
        "start from",
        "RUN_OR_HF",
        cli.path,
        may_change=True,
    )
    from_task: str | None = start(
        "start from the encoder of a model fine-tuned on another task (the paper: RTE, STS-B and "
        "MRPC from MNLI): its --output, or the name of a folder beside this --output",
        "DIR",
        cli.path,
        default=None,
        shown_default="the encoder of --checkpoint",
        may_change=True,
    )
    average: bool = start("start from the averaged weights of --checkpoint", default=False)
    from_scratch: bool = start(
        "take only the shape and the vocabulary of --checkpoint and start from random weights, as "
        "a baseline",
        default=False,
    )
    head: HeadConfig
    vocab_sha256: str
    lengths: Lengths
    features: dict[str, str]  # split -> fingerprint of its content and how it was tokenised
    steps: int = cli.flag(SHARED["steps"], shown_default=BY_TASK, group=SETTINGS, may_change=False)
    batch_size: int = cli.flag(
        SHARED["batch_size"],
        help="examples (SQuAD: windows) of one optimizer step, all ranks together",
        shown_default=BY_TASK,
        group=SETTINGS,
    )
    micro_batch_size: int = cli.flag(
        SHARED["micro_batch_size"], shown_default="a rank's share of the batch", group=LAYOUT
    )
    warmup_steps: int = cli.flag(SHARED["warmup_steps"], shown_default=BY_TASK, group=SETTINGS)
    deepspeed_config: str = cli.flag(
        SHARED["deepspeed_config"], shown_default="ds_configs/zero1_fp32_adamw.json", group=LAYOUT
    )
    seed: int = what(
        "seed of the head's weights, the order of the examples and dropout; the first of --seeds",
        "N",
        cli.integer(0, (1 << 63) - 1),
        default=0,
    )
    seeds: int = what(
        "number of runs. With more than one, each has the next seed and a folder DIR/seed-S, and "
        "DIR/results.json has the median, mean and spread",
        "RUNS",
        cli.integer(1, 10_000),
        default=1,
        may_change=True,
    )
    log_every: int = cli.flag(SHARED["log_every"], default=50)
    eval_every: int = cli.flag(
        SHARED["eval_every"], shown_default="a tenth of --steps", may_change=False
    )
    save_every: int = cli.flag(SHARED["save_every"], shown_default="that of --eval-every")
    # The best evaluation is kept in any case.
    patience: int | None = setting(
        "stop after this many evaluations without a better one",
        "EVALUATIONS",
        cli.positive,
        default=None,
        shown_default="all steps are run",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened(SharedOpened):
    """What the command line of fine-tuning names."""

    task: Task

    @property
    def source(self) -> ModelFolder:
        """The model of --checkpoint."""
        return self.models["--checkpoint"]

    @property
    def start(self) -> ModelFolder:
        """The model whose encoder a new run starts from: that of --from-task or --checkpoint."""
        return self.models.get("--from-task", self.source)


def build_parser() -> cli.Parser:
    """The parser of finetune.py, from the fields that the flags fill."""
    parser = cli.Parser(
        description="Fine-tune ALBERT on a task and evaluate it on its dev set (section 4.9 of the "
        "paper). Given the same --output again, resumes.",
    )
    for title in (WHAT, START, SETTINGS, LAYOUT, RHYTHM):
        parser.add_argument_group(title)
    cli.add_flags(parser, FinetuneConfig)
    for name, part in PARTS.items():
        cli.add_flag(parser, name, part)
    cli.add_flag(parser, "config", CONFIG)
    cli.add_instead(parser, "steps", "epochs", replace(EPOCHS, group=SETTINGS))
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser


def refuse_eight_bits(path: str, deepspeed: dict) -> None:
    if has_eight_bits(deepspeed):
        raise UserError(
            f"--deepspeed_config {path}: fp8.enabled true is refused in fine-tuning, whose updates "
            "are few; allowed: false"
        )


def read_config(argv: list[str], *, world_size: int) -> tuple[FinetuneConfig, Opened]:
    """Parse and check a command line, and read what its defaults depend on.

    Returns what was opened with the configuration: the rest of the run opens nothing of it again.
    Raises UserError for the first thing that is wrong, DamagedData if SQuAD's questions cannot be
    counted.
    """
    before = read_previous(cli.peek_output(argv))
    plugin_sha256 = take_plugin(argv, before)  # it may add to what the flags allow
    args = parse(build_parser(), argv, FinetuneConfig)
    from albert_ds.model.task_heads import HEADS, HeadConfig
    from albert_ds.tasks.registry import fingerprint_splits

    recipe = RECIPES[args.task]
    data = Path(args.data)
    task = _open_task(args)
    _check_args(args)
    is_typed = args.dropout is not None
    dropout = args.dropout if is_typed else recipe.classifier_dropout
    head = HeadConfig(
        kind=task.head,
        num_labels=HEADS[task.head].width(len(task.labels)),
        dropout=dropout,
        labels=task.labels,
    )
    models = _open_models(args, before)
    source = models["--checkpoint"]
    dropout = args.dropout if is_typed else recipe.dropout
    model = replace(source.encoder_config, dropout=dropout, pair_head=head.row.reads_pooled)
    lengths = _resolve_lengths(args.sequence_length, recipe.lengths, model)
    args.batch_size = args.batch_size or recipe.batch_size
    args.deepspeed_config = args.deepspeed_config or str(DS_CONFIG)
    micro, ds_config, deepspeed = resolve_deepspeed(
        args, model, world_size=world_size, default_learning_rate=find_rate(recipe, model)
    )
    refuse_eight_bits(args.deepspeed_config, deepspeed)
    if args.epochs is not None:
        recipe = replace(recipe, steps=None, epochs=args.epochs)
    steps = args.steps or recipe.steps or _count_steps(args, recipe, task)
    eval_every = args.eval_every or -(-steps // EVALUATIONS)
    resolved: dict[str, Any] = {
        "plugin_sha256": plugin_sha256,
        "command": join_command("finetune", argv),
        "checkpoint": str(source.checkpoint.path if source.checkpoint else source.path),
        "from_task": str(models["--from-task"].path) if args.from_task else None,
        "model": model,
        "head": head,
        "vocab_sha256": source.vocab.sha256,
        "features": fingerprint_splits(args.task, task, data, source.vocab, lengths),
        "lengths": lengths,
        "steps": steps,
        "micro_batch_size": micro,
        "warmup_steps": resolve_warmup(args.warmup_steps, steps, recipe.count_warmup(steps)),
        "deepspeed": deepspeed,
        "eval_every": eval_every,
        "save_every": args.save_every or eval_every,
    }
    config = FinetuneConfig(**cli.values_of(args, FinetuneConfig) | resolved)
    check_resume(config, before, ds_config)
    return config, Opened(ds_config=ds_config, models=models, task=task)


def _open_models(args, before: dict | None) -> dict[str, ModelFolder]:
    """By flag; `before`: the content of RUN/config.json."""
    from albert_ds.checkpoint.model_folder import ModelFolder

    models = {"--checkpoint": ModelFolder(find_checkpoint(args, before), average=args.average)}
    if args.from_task:
        models["--from-task"] = ModelFolder(find_task_model(args))
    return models


def _count_steps(args, recipe: Recipe, task) -> int:
    """Of the recipe's epochs over the examples (SQuAD's questions)."""
    examples = task.count_examples(Path(args.data))
    return recipe.count_steps(examples=examples, batch_size=args.batch_size)


def _open_task(args) -> Task:
    """The task whose files --data holds."""
    from albert_ds.tasks.registry import open_task

    data = Path(args.data)
    if not data.is_dir():
        raise UserError(f"--data {data}: no such folder; must be the folder of {args.task}")
    task = open_task(args.task, data)
    for split in ("train", *task.dev_splits):
        for file in task.files(data, split)[:1]:
            if not file.is_file():
                raise UserError(f"--data {data}: {file.name} is missing")
    return task


def _check_args(args) -> None:
    starts = (args.average, args.from_task, args.from_scratch)
    if sum(map(bool, starts)) > 1:
        raise UserError("--average, --from-task, --from-scratch: one of them, not with another")
    inputs = filter(None, (args.data, args.checkpoint, args.from_task))
    check_folder(Path(args.output), inputs, names=RUN_NAMES, marks=RUN_MARKS)


def find_checkpoint(args, before: dict | None) -> Path:
    """--checkpoint or, if that run went on since, its checkpoint that --output started from.

    before: the content of RUN/config.json.
    """
    started = Path(str((before or {}).get("checkpoint")))
    typed = Path(args.checkpoint)
    return started if started.parent.parent == typed and started.is_dir() else typed


def find_task_model(args) -> Path:
    """The folder that --from-task means: a run, its best seed, or such a one beside --output."""
    folder = Path(args.from_task)
    if not folder.is_dir():
        folder = Path(args.output).resolve().parent / args.from_task
    if not folder.is_dir():
        raise UserError(
            f"--from-task {args.from_task}: no such folder, nor {folder}; allowed: the --output of "
            "another task's fine-tuning, or its name where it lies beside this --output"
        )
    results = folder / "results.json"
    if not results.is_file():
        return folder
    summary = read_json(results)
    best = summary.get("best_seed")
    check(best, (cli.non_negative, None), f"{results}: best_seed")
    return folder / f"seed-{best}" if best is not None else folder


def find_rate(recipe: Recipe, model: ModelConfig) -> float:
    """The task's published learning rate; a narrower model than it was published for needs more.

    The square is a rule of thumb. In short runs of a pretrained model 256 wide the best rates
    were 0.4 to 11 times as high (docs/finetuning.md).
    """
    if model.hidden_size >= NARROWEST:
        return recipe.learning_rate
    return min(HIGHEST, recipe.learning_rate * (NARROWEST / model.hidden_size) ** 2)


def describe_rate(config: FinetuneConfig) -> str:
    """The rate beside the published one."""
    published = RECIPES[config.task].learning_rate
    return (
        f"learning rate {config.learning_rate:g}; that of the task for {NARROWEST} units and more: "
        f"{published:g}"
    )


def _resolve_lengths(typed: int | None, published: Lengths, model: ModelConfig) -> Lengths:
    longest = model.max_position_embeddings
    sequence = typed or min(published.sequence, longest)
    if not SHORTEST <= sequence <= longest:
        raise UserError(
            f"--sequence-length {sequence}: the model takes at most {longest} tokens, and "
            f"fine-tuning needs {SHORTEST}"
        )
    return published.cut_to(sequence)
