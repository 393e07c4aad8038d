"""The command line of fine-tuning -> one checked `FinetuneConfig`.

What is not typed comes from the task's recipe (tasks/recipes.py). Steps may follow from the number
of training sequences, so they are resolved once those are there.
"""

import json
import os
from argparse import Namespace
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from albert_ds.data.vocab import read_vocab
from albert_ds.errors import UserError
from albert_ds.flags import as_flag
from albert_ds.interop import locate, read_json
from albert_ds.model.config import ModelConfig
from albert_ds.model.head_config import HeadConfig
from albert_ds.optim.schedule import learning_rate
from albert_ds.parallel.mesh import check_tensor_parallel
from albert_ds.runtime.ds_config import check_fused_lamb, read_ds_config, resolve_ds_config
from albert_ds.tasks.recipes import RECIPES, Lengths, Recipe
from albert_ds.tasks.table import TASKS, head_of
from albert_ds.tuning.flags import build_parser

DS_CONFIG = Path(__file__).parents[2] / "ds_configs" / "zero1_fp32_adamw.json"
EVALUATIONS = 10  # of the dev set in a run, unless --eval-every says otherwise
# What another run of the same OUTPUT may change; everything else must be as it was.
MAY_CHANGE = {
    *("data", "output", "checkpoint", "from_task", "cache", "micro_batch_size", "deepspeed_config"),
    *("tensor_parallel", "activation_checkpointing", "log_every", "save_every", "max_hours"),
    *("timeout_minutes", "seeds"),
}
FIXED_DS_KEYS = ("optimizer", "gradient_clipping", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig:
    """Every value that decides a fine-tuning run, resolved."""

    task: str  # a key of TASKS
    data: str  # the task's folder
    checkpoint: str  # whose vocabulary and encoder it starts from
    from_task: str | None  # a fine-tuned model, whose encoder takes its place
    from_scratch: bool  # only the checkpoint's shape and vocabulary, no weights
    output: str
    model: ModelConfig
    head: HeadConfig
    vocab_sha256: str
    features: dict[str, str]  # split -> fingerprint of its content and how it was tokenised
    lengths: Lengths
    steps: int  # 0 until `resolve_steps`
    batch_size: int  # examples (SQuAD: windows) of one optimizer step, all ranks together
    micro_batch_size: int  # of one pass on one rank
    warmup_steps: int
    deepspeed_config: str
    deepspeed: dict  # the JSON with every "auto" that the command line owns filled in
    tensor_parallel: int
    activation_checkpointing: str
    seed: int  # of the head's weights, the order of examples and dropout
    seeds: int  # runs, with seed, seed + 1, ...
    cache: str  # folder of tokenised features
    log_every: int
    eval_every: int
    save_every: int
    patience: int | None  # evaluations without a better one after which training ends
    max_hours: float | None
    timeout_minutes: float  # that a rank may be missing or hold the others up

    @property
    def run(self) -> Path:
        return Path(self.output)

    def rate_at(self, step: int) -> float:
        """Learning rate of the update that follows `step` finished steps."""
        peak = self.deepspeed["optimizer"]["params"]["lr"]
        return learning_rate(step, peak=peak, warmup_steps=self.warmup_steps, num_steps=self.steps)


def read_config(argv: list[str], *, world_size: int) -> tuple[FinetuneConfig, Namespace]:
    """Parse and check a command line; also what was typed, which `resolve_steps` needs.

    Raises UserError for the first thing that is wrong.
    """
    args = build_parser(TASKS).parse_args(argv)
    recipe, task = RECIPES[args.task], TASKS[args.task]
    _check_args(args, task)
    root = locate(args.checkpoint)[0]
    kind, num_labels = head_of(args.task)
    dropout = (
        recipe.classifier_dropout if args.classifier_dropout is None else args.classifier_dropout
    )
    head = HeadConfig(kind=kind, num_labels=num_labels, dropout=dropout, labels=task.labels)
    model = _read_model(args, recipe, head)
    lengths = _resolve_lengths(args, recipe.lengths, model)
    vocab = read_vocab(root / "spiece.model")
    if vocab.size != model.vocab_size:
        raise UserError(
            f"--checkpoint {args.checkpoint}: its spiece.model has {vocab.size} pieces, its "
            f"model's vocab_size is {model.vocab_size}; they must be the same"
        )
    batch_size = args.batch_size or recipe.batch_size
    micro, deepspeed = _resolve_deepspeed(args, recipe, model, batch_size, world_size)
    config = FinetuneConfig(
        from_task=str(find_task_model(args)) if args.from_task else None,
        model=model,
        head=head,
        vocab_sha256=vocab.sha256,
        features={},
        lengths=lengths,
        steps=0,
        batch_size=batch_size,
        micro_batch_size=micro,
        warmup_steps=0,
        deepspeed=deepspeed,
        deepspeed_config=str(args.deepspeed_config or DS_CONFIG),
        cache=str(args.cache or args.output / "features"),
        **{name: getattr(args, name) for name in _TAKEN_AS_TYPED},
        **{name: str(getattr(args, name)) for name in ("data", "checkpoint", "output")},
        eval_every=args.eval_every or 0,
        save_every=args.save_every or 0,
    )
    return config, args


_TAKEN_AS_TYPED = (
    *("task", "from_scratch", "tensor_parallel", "activation_checkpointing", "seed", "seeds"),
    *("log_every", "patience", "max_hours", "timeout_minutes"),
)


def _check_args(args, task) -> None:
    if not args.data.is_dir():
        raise UserError(f"--data {args.data}: no such folder; must be the folder of {args.task}")
    for split in ("train", *task.dev_splits):
        for path in task.files(args.data, split)[:1]:
            if not path.is_file():
                raise UserError(f"--data {args.data}: {path.name} is missing")
    for name in ("max_hours", "timeout_minutes"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{as_flag(name)} {value}: must be above 0")
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output {args.output}: exists and is not a folder")


def find_task_model(args) -> Path:
    """The folder that --from-task means: a run, its best seed, or such a one beside --output."""
    folder = Path(args.from_task)
    if not folder.is_dir():
        folder = args.output.resolve().parent / args.from_task
    if not folder.is_dir():
        raise UserError(
            f"--from-task {args.from_task}: no such folder, nor {folder}; allowed: the --output of "
            "another task's fine-tuning, or its name where it lies beside this --output"
        )
    results = folder / "results.json"
    best = read_json(results).get("best_seed") if results.is_file() else None
    return folder / f"seed-{best}" if best is not None else folder


def _read_model(args, recipe: Recipe, head: HeadConfig) -> ModelConfig:
    from albert_ds.interop import read_encoder

    found, _ = read_encoder(args.checkpoint)
    dropout = recipe.dropout if args.dropout is None else args.dropout
    return replace(found, dropout=dropout, pair_head=head.reads_pooled)


def _resolve_lengths(args, lengths: Lengths, model: ModelConfig) -> Lengths:
    longest = model.max_position_embeddings
    sequence = args.sequence_length or min(lengths.sequence, longest)
    if sequence > longest:
        raise UserError(f"--sequence-length {sequence}: the model takes at most {longest} tokens")
    resolved = Lengths(
        sequence=sequence,
        question=args.question_length or lengths.question,
        stride=args.stride or lengths.stride,
        answer=args.answer_length or lengths.answer,
    )
    if not args.task.startswith("glue/") and resolved.question + 4 > sequence:
        raise UserError(
            f"--question-length {resolved.question}: leaves no room for a passage in "
            f"--sequence-length {sequence}; allowed: at most {sequence - 4}"
        )
    return resolved


def _resolve_deepspeed(args, recipe: Recipe, model: ModelConfig, batch_size: int, world_size: int):
    check_tensor_parallel(
        args.tensor_parallel,
        world_size=world_size,
        num_heads=model.num_heads,
        ffn_size=model.ffn_size,
    )
    ranks = world_size // args.tensor_parallel
    micro = args.micro_batch_size or max(1, batch_size // ranks)
    accumulation, left = divmod(batch_size, micro * ranks)
    if left:
        raise UserError(
            f"--batch-size {batch_size} is no multiple of --micro-batch-size {micro} x {ranks} "
            f"data-parallel ranks; allowed: multiples of {micro * ranks}"
        )
    path = Path(args.deepspeed_config or DS_CONFIG)
    ds_config = read_ds_config(path)
    check_fused_lamb(path, ds_config, tensor_parallel=args.tensor_parallel)
    return micro, resolve_ds_config(
        ds_config,
        batch_size=batch_size,
        micro_batch_size=micro,
        accumulation=accumulation,
        learning_rate=args.learning_rate,
        default_learning_rate=recipe.learning_rate,
    )


def resolve_steps(config: FinetuneConfig, args, *, units: int) -> FinetuneConfig:
    """Fill in what depends on the number of training examples (SQuAD: windows)."""
    recipe = RECIPES[config.task]
    steps = args.steps or recipe.steps or -(-int(units * (recipe.epochs or 0)) // config.batch_size)
    warmup = round(recipe.warmup * steps) if args.warmup_steps is None else args.warmup_steps
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


def check_resume(config: FinetuneConfig) -> None:
    """Compare with what OUTPUT was started with; UserError for what may not change."""
    path = config.run / "config.json"
    if not path.exists():
        return
    before, now = read_json(path), as_json(config)
    for name in (f.name for f in fields(FinetuneConfig) if f.name not in MAY_CHANGE):
        old, new = before.get(name), now[name]
        if name == "deepspeed":
            old, new = ({k: (v or {}).get(k) for k in FIXED_DS_KEYS} for v in (old, new))
        if isinstance(old, dict) and isinstance(new, dict):
            key = next((k for k in {**old, **new} if old.get(k) != new.get(k)), None)
            old, new = (old.get(key), new.get(key)) if key else (None, None)
            name = f"{name}.{key}"
        if old != new:
            raise UserError(
                f"{as_flag(name)} is {new}, but {config.output} was started with {old}; use that, "
                "or another --output"
            )


def as_json(config: FinetuneConfig) -> dict:
    """The resolved configuration as plain JSON values."""
    return json.loads(json.dumps(asdict(config)))


def write_run_files(config: FinetuneConfig) -> None:
    """OUTPUT/config.json, and the vocabulary, so that OUTPUT is all that an export needs."""
    from albert_ds.runtime.versions import read_versions

    config.run.mkdir(parents=True, exist_ok=True)
    temporary = config.run / ".config.json.tmp"
    record = {**as_json(config), "versions": read_versions()}
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, config.run / "config.json")
    read_vocab(locate(Path(config.checkpoint))[0] / "spiece.model").write(config.run)
