"""The command line of fine-tuning -> one checked `FinetuneConfig`.

What is not typed comes from the task's recipe (tasks/recipes.py). The number of steps may depend on
the number of training examples, so `resolve_steps` fills it in after they have been read. Nothing
heavy is imported at the top: `--help` answers at once.
"""

import argparse
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from albert_ds.cli import Flag, Number, Parser, add_flag, add_flags, flag, flags_of, path, positive
from albert_ds.errors import UserError
from albert_ds.files import PACKAGE
from albert_ds.json_files import check, read_json
from albert_ds.model.config import DROPOUT, HeadConfig, ModelConfig
from albert_ds.settings.shared import (
    BATCH_SIZE,
    DEEPSPEED_CONFIG,
    EVAL_EVERY,
    LAYOUT,
    LEARNING_RATE,
    LOG_EVERY,
    MICRO_BATCH_SIZE,
    RHYTHM,
    SAVE_EVERY,
    STEPS,
    WARMUP_STEPS,
    WHAT,
    SharedConfig,
    check_output,
    check_resume,
    join_command,
    resolve_deepspeed,
    write_config,
)
from albert_ds.tasks.recipes import RECIPES, SHORTEST, Lengths, Recipe

DS_CONFIG = PACKAGE / "ds_configs" / "zero1_fp32_adamw.json"
EVALUATIONS = 10  # of the dev set in a run, unless --eval-every says otherwise
START = "where to start"
SETTINGS = "settings"
BY_TASK = "the one published for the task"
NARROWEST = 768  # hidden size of ALBERT-base, the narrowest model that rates were published for
HIGHEST = 1e-3  # learning rate by default
# Flags that fill a part of a field, by its path.
NESTED: dict[str, Flag] = {
    "deepspeed.optimizer.params.lr": replace(
        LEARNING_RATE,
        shown_default=f"{BY_TASK}; times ({NARROWEST} / H)^2, to {HIGHEST:g}, if H < {NARROWEST}",
        group=SETTINGS,
    ),
    "model.dropout": Flag(
        help="probability of dropout, in ALBERT and before the task's head",
        type=DROPOUT,
        metavar="P",
        name="--dropout",
        shown_default=BY_TASK,
        group=SETTINGS,
    ),
    "lengths.sequence": Flag(
        help="longest sequence, with [CLS] and [SEP]; what is kept of a question and the step "
        "from window to window are at most two thirds of it",
        type=positive,
        metavar="TOKENS",
        name="--sequence-length",
        shown_default=BY_TASK,
        group=SETTINGS,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig(SharedConfig):
    """Every value that decides a fine-tuning run, resolved."""

    task: str = flag("task to learn", choices=RECIPES, group=WHAT)
    data: str = flag(
        "folder with the task's files as published: {train,dev,test}.tsv; "
        "{train,dev}-{v1.1,v2.0}.json; {train,dev,test}/{middle,high}/*.txt",
        type=path,
        metavar="TASKDIR",
        group=WHAT,
        may_change=True,
    )
    checkpoint: str = flag(
        "pretrained run, converted checkpoint or Hugging Face folder: vocabulary and encoder to "
        "start from",
        type=path,
        metavar="RUN_OR_HF",
        group=WHAT,
        may_change=True,
    )
    from_task: str | None = flag(
        "start from the encoder of a model fine-tuned on another task (the paper: RTE, STS-B and "
        "MRPC from MNLI): its --output, or the name of a folder beside this --output",
        default=None,
        shown_default="the encoder of --checkpoint",
        type=path,
        metavar="DIR",
        group=START,
        may_change=True,
    )
    from_scratch: bool = flag(
        "take only the shape and the vocabulary of --checkpoint and start from random weights, as "
        "a baseline",
        default=False,
        group=START,
    )
    head: HeadConfig
    vocab_sha256: str
    features: dict[str, str]  # split -> fingerprint of its content and how it was tokenised
    lengths: Lengths
    steps: int = flag(STEPS, shown_default=BY_TASK, group=SETTINGS)  # 0 until `resolve_steps`
    batch_size: int = flag(
        BATCH_SIZE,
        help="examples (SQuAD: windows) of one optimizer step, all ranks together",
        shown_default=BY_TASK,
        group=SETTINGS,
    )
    micro_batch_size: int = flag(
        MICRO_BATCH_SIZE, shown_default="a rank's whole share of the batch", group=LAYOUT
    )
    warmup_steps: int = flag(WARMUP_STEPS, shown_default=BY_TASK, group=SETTINGS)
    deepspeed_config: str = flag(
        DEEPSPEED_CONFIG, shown_default="ds_configs/zero1_fp32_adamw.json", group=LAYOUT
    )
    seed: int = flag(
        "seed of the head's weights, the order of the examples and dropout; the first of --seeds",
        default=0,
        type=Number(low=0, high=(1 << 63) - 1, whole=True),
        metavar="N",
        group=WHAT,
    )
    seeds: int = flag(
        "number of runs. With more than one, each has the next seed and a folder DIR/seed-S, and "
        "DIR/results.json has the median, mean and spread",
        default=1,
        type=Number(low=1, high=10_000, whole=True),
        metavar="RUNS",
        group=WHAT,
        may_change=True,
    )
    log_every: int = flag(LOG_EVERY, default=50)
    eval_every: int = flag(EVAL_EVERY, shown_default="a tenth of --steps")
    save_every: int = flag(SAVE_EVERY, shown_default="that of --eval-every")
    # The best evaluation is kept in any case.
    patience: int | None = flag(
        "stop after this many evaluations without a better one",
        default=None,
        shown_default="all steps are run",
        type=positive,
        metavar="EVALUATIONS",
        group=SETTINGS,
    )


def build_parser() -> Parser:
    """The parser of finetune.py, from the fields that the flags fill."""
    parser = Parser(
        description="Fine-tune ALBERT on a task and evaluate it on its dev set (section 4.9 of the "
        "paper). Given the same --output again, resumes.",
    )
    for title in (WHAT, START, SETTINGS, LAYOUT, RHYTHM):
        parser.add_argument_group(title)
    add_flags(parser, FinetuneConfig)
    for nested in NESTED.values():
        assert nested.name
        add_flag(parser, nested.name.removeprefix("--").replace("-", "_"), nested)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser


def read_config(argv: list[str], *, world_size: int) -> tuple[FinetuneConfig, Namespace]:
    """Parse and check a command line; also what was typed, which `resolve_steps` needs.

    Raises UserError for the first thing that is wrong.
    """
    args = build_parser().parse_args(argv)
    from albert_ds.interop.folder import ModelFolder
    from albert_ds.tasks.registry import TASKS, head_of

    recipe, task = RECIPES[args.task], TASKS[args.task]
    _check_args(args, task)
    kind, num_labels = head_of(args.task)
    is_typed = args.dropout is not None
    dropout = args.dropout if is_typed else recipe.classifier_dropout
    head = HeadConfig(kind=kind, num_labels=num_labels, dropout=dropout, labels=task.labels)
    source = ModelFolder(args.checkpoint)
    found, _ = source.read_encoder()
    dropout = args.dropout if is_typed else recipe.dropout
    model = replace(found, dropout=dropout, pair_head=head.reads_pooled)
    lengths = _resolve_lengths(args.sequence_length, recipe.lengths, model)
    vocab = source.vocab
    batch_size, file = args.batch_size or recipe.batch_size, args.deepspeed_config or str(DS_CONFIG)
    micro, deepspeed = resolve_deepspeed(
        args,
        model,
        world_size=world_size,
        batch_size=batch_size,
        micro_batch_size=args.micro_batch_size,
        deepspeed_config=file,
        default_learning_rate=find_rate(recipe, model),
    )
    typed: dict[str, Any] = {"command": join_command("finetune", argv)}
    typed |= {name: getattr(args, name) for name in flags_of(FinetuneConfig)}
    resolved: dict[str, Any] = {
        "from_task": str(find_task_model(args)) if args.from_task else None,
        "model": model,
        "head": head,
        "vocab_sha256": vocab.sha256,
        "features": {},
        "lengths": lengths,
        "batch_size": batch_size,
        "micro_batch_size": micro,
        "deepspeed_config": file,
        "deepspeed": deepspeed,
        # `resolve_steps` fills these in.
        **dict.fromkeys(("steps", "warmup_steps", "eval_every", "save_every"), 0),
    }
    return FinetuneConfig(**typed | resolved), args


def _check_args(args, task) -> None:
    data = Path(args.data)
    if not data.is_dir():
        raise UserError(f"--data {data}: no such folder; must be the folder of {args.task}")
    for split in ("train", *task.dev_splits):
        for file in task.files(data, split)[:1]:
            if not file.is_file():
                raise UserError(f"--data {data}: {file.name} is missing")
    check_output(args.output)


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
    found = read_json(results)
    best = found.get("best_seed")
    check(best, (Number(low=0, whole=True), None), f"{results}: best_seed")
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
    """Where a rate that was not typed comes from."""
    published = RECIPES[config.task].learning_rate
    if config.learning_rate == published:
        return f"learning rate {published:g}, as published"
    if config.learning_rate != find_rate(RECIPES[config.task], config.model):
        return f"learning rate {config.learning_rate:g}, from {config.deepspeed_config}"
    return (
        f"learning rate {config.learning_rate:g}: the published {published:g} times "
        f"({NARROWEST} / {config.model.hidden_size})^2, at most {HIGHEST:g}"
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


def resolve_steps(config: FinetuneConfig, args, *, examples: int) -> FinetuneConfig:
    """Fill in what depends on the number of training examples (SQuAD: questions)."""
    recipe = RECIPES[config.task]
    steps = args.steps or recipe.count_steps(examples=examples, batch_size=config.batch_size)
    warmup = recipe.count_warmup(steps) if args.warmup_steps is None else args.warmup_steps
    if warmup > steps:
        raise UserError(f"--warmup-steps {warmup}: must be at most --steps {steps}")
    every = args.eval_every or -(-steps // EVALUATIONS)
    return replace(
        config,
        steps=steps,
        warmup_steps=warmup,
        eval_every=every,
        save_every=args.save_every or every,
    )


def write_run_files(config: FinetuneConfig) -> None:
    """RUN/config.json, and the vocabulary, so that an export needs nothing but RUN.

    Raises UserError where RUN was started with other settings.
    """
    from albert_ds.interop.folder import ModelFolder

    check_resume(config, NESTED)
    write_config(config)
    ModelFolder(config.checkpoint).vocab.write(config.run)
