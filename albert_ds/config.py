"""The command line of pretraining -> one checked `RunConfig`.

Each part declares its own dataclass and never sees this one. Everything that can be wrong with
what the user typed is found here, before a rank starts work and before anything is written.
Imports nothing heavy: `--help` answers at once.
"""

import json
import os
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

from albert_ds.data.samples import StreamConfig
from albert_ds.errors import UserError
from albert_ds.flags import DEFAULT_LEARNING_RATE, SIZE_FLAGS, as_flag, build_parser
from albert_ds.model.config import SIZES, ModelConfig
from albert_ds.optim.schedule import learning_rate
from albert_ds.runtime.ds_config import check_fused_lamb, read_ds_config, resolve_ds_config

WARMUP_FRACTION = 0.025  # the release's 3,125 of 125,000
# What another run of the same RUN may change; everything else must be as it was.
MAY_CHANGE = {
    "steps",
    "warmup_steps",
    "max_hours",
    "log_every",
    "eval_every",
    "save_every",
    "keep_last",
    "keep_every",
    "timeout_minutes",
    "micro_batch_size",
    "tensor_parallel",
    "activation_checkpointing",
    "compile",
    "num_workers",
    "wandb",
    "deepspeed_config",
    "output",
    "data",
}
# Of DeepSpeed's JSON only these are part of what is computed; the rest is layout.
FIXED_DS_KEYS = ("optimizer", "gradient_clipping", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Every value that decides a pretraining run, resolved."""

    size: str  # a key of SIZES
    model: ModelConfig
    stream: StreamConfig
    data: list[str]  # folders of shards
    data_weights: list[float]  # share of each in the samples; sums to 1
    data_sha256: list[str]  # tells the shards from any others, wherever they lie
    output: str
    steps: int
    batch_size: int  # samples of one optimizer step, all ranks together
    micro_batch_size: int  # samples of one pass on one rank
    warmup_steps: int
    deepspeed_config: str
    deepspeed: dict  # the JSON with every "auto" that the command line owns filled in
    tensor_parallel: int = 1
    activation_checkpointing: str = "none"
    compile: bool = False
    num_workers: int = 0
    init_from: str | None = None
    seed: int = 0
    log_every: int = 10
    eval_every: int = 1000
    eval_samples: int = 4096
    save_every: int = 1000
    keep_last: int = 3
    keep_every: int | None = None  # steps whose multiples are kept for good
    max_hours: float | None = None
    timeout_minutes: float = 10  # that a rank may be missing or hold the others up
    wandb: bool = False

    @property
    def learning_rate(self) -> float:
        return self.deepspeed["optimizer"]["params"]["lr"]

    @property
    def run(self) -> Path:
        return Path(self.output)

    def rate_at(self, step: int) -> float:
        """Learning rate of the update that follows `step` finished steps."""
        return learning_rate(
            step, peak=self.learning_rate, warmup_steps=self.warmup_steps, num_steps=self.steps
        )


def read_config(argv: list[str], *, world_size: int) -> RunConfig:
    """Parse and check a command line; raise UserError for the first thing that is wrong."""
    args = build_parser(DEFAULTS).parse_args(argv)
    sources = _open_sources(args.data)
    model = _resolve_model(args, sources)
    weights = _resolve_weights(args, sources)
    stream = _resolve_stream(args, model, sources)
    deepspeed = _resolve_deepspeed(args, world_size, model)
    for name in ("max_hours", "timeout_minutes"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{as_flag(name)} {value}: must be above 0")
    if args.init_from is not None and not Path(args.init_from).is_dir():
        raise UserError(f"--init-from {args.init_from}: no such folder")
    if args.init_from is not None:
        from albert_ds.interop import read_initial_weights

        # Refused here, before a file is written.
        for name, tensor in read_initial_weights(Path(args.init_from), model).items():
            if not tensor.isfinite().all():
                raise UserError(f"--init-from {args.init_from}: {name} is not finite (NaN or Inf)")
    if args.wandb:
        _require_wandb()
    if Path(args.output).exists() and not Path(args.output).is_dir():
        raise UserError(f"--output {args.output}: exists and is not a folder")
    warmup = args.warmup_steps
    if warmup is None:
        warmup = round(WARMUP_FRACTION * args.steps)
    if warmup > args.steps:
        raise UserError(f"--warmup-steps {warmup}: must be at most --steps {args.steps}")
    config = RunConfig(
        size=args.model,
        model=model,
        stream=stream,
        data_weights=weights,
        data_sha256=[source.fingerprint for source in sources],
        warmup_steps=warmup,
        deepspeed=deepspeed,
        **{name: getattr(args, name) for name in _TAKEN_AS_TYPED},
    )
    return _check_resume(config, warmup_given=args.warmup_steps is not None)


DEFAULTS = {f.name: f.default for f in fields(RunConfig) if f.default is not MISSING}
_TAKEN_AS_TYPED = (
    *("data", "output", "steps", "batch_size", "micro_batch_size", "deepspeed_config"),
    *DEFAULTS,
)


def _open_sources(folders: list[str]):
    from albert_ds.data.shards import open_shards

    sources = [open_shards(folder, "train") for folder in folders]
    for folder, source in zip(folders, sources, strict=True):
        if source.vocab.sha256 != sources[0].vocab.sha256:
            raise UserError(
                f"--data {folder}: its vocabulary differs from that of {folders[0]}; "
                "all shards of a run must be built with one spiece.model"
            )
    return sources


def _resolve_model(args, sources) -> ModelConfig:
    given = {name: getattr(args, name) for name in SIZE_FLAGS if hasattr(args, name)}
    given |= {name: getattr(args, name) for name in ("sharing", "dropout") if hasattr(args, name)}
    if "hidden_size" in given:
        given.setdefault("ffn_size", 4 * given["hidden_size"])
    found = sources[0].vocab.size
    if given.setdefault("vocab_size", found) != found:
        raise UserError(
            f"--vocab-size {given['vocab_size']}: the shards in {args.data[0]} were built with "
            f"{found} pieces; allowed: {found}"
        )
    return replace(SIZES[args.model], **given, pair_head=args.objective != "none")


def _resolve_weights(args, sources) -> list[float]:
    weights = args.data_weights
    if weights is None:
        weights = [float(source.sizes.sum()) for source in sources]
    if len(weights) != len(sources):
        raise UserError(
            f"--data-weights: {len(weights)} numbers for {len(sources)} --data; allowed: one each"
        )
    if min(weights) <= 0:
        raise UserError(f"--data-weights {min(weights)}: must be above 0")
    return [weight / sum(weights) for weight in weights]


def _resolve_stream(args, model: ModelConfig, sources) -> StreamConfig:
    built = min(source.sequence_length for source in sources)
    length = args.sequence_length or min(built, model.max_position_embeddings)
    if length > built:
        raise UserError(f"--sequence-length {length}: the shards hold at most {built}")
    if length > model.max_position_embeddings:
        raise UserError(
            f"--sequence-length {length}: --max-position-embeddings is "
            f"{model.max_position_embeddings}"
        )
    return StreamConfig(
        objective=args.objective,
        sequence_length=length,
        masked_fraction=args.masked_fraction,
        max_predictions=args.max_predictions,
        max_ngram=args.max_ngram,
        word_boundaries=args.word_boundaries,
        seed=args.seed,
    )


def _resolve_deepspeed(args, world_size: int, model: ModelConfig) -> dict:
    from albert_ds.parallel.mesh import check_tensor_parallel

    check_tensor_parallel(
        args.tensor_parallel,
        world_size=world_size,
        num_heads=model.num_heads,
        ffn_size=model.ffn_size,
    )
    ranks = world_size // args.tensor_parallel
    accumulation, left = divmod(args.batch_size, args.micro_batch_size * ranks)
    if left:
        unit = args.micro_batch_size * ranks
        raise UserError(
            f"--batch-size {args.batch_size} is no multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {ranks} data-parallel ranks; allowed: multiples of {unit}"
        )
    path = Path(args.deepspeed_config)
    ds_config = read_ds_config(path)
    check_fused_lamb(path, ds_config, tensor_parallel=args.tensor_parallel)
    return resolve_ds_config(
        ds_config,
        batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size,
        accumulation=accumulation,
        learning_rate=args.learning_rate,
        default_learning_rate=DEFAULT_LEARNING_RATE,
    )


def _require_wandb() -> None:
    from importlib.util import find_spec

    if find_spec("wandb") is None:
        raise UserError("--wandb: the package wandb is not installed; pip install wandb")


def _check_resume(config: RunConfig, *, warmup_given: bool) -> RunConfig:
    """Compare with what RUN was started with; raise UserError for the first value that may not
    change."""
    path = config.run / "config.json"
    if not path.exists():
        return config
    try:
        before = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"--output {config.output}: {path} is not JSON ({error})") from error
    if not warmup_given:
        config = replace(config, warmup_steps=before["warmup_steps"])
    now = as_json(config)
    for name in (f.name for f in fields(RunConfig)):
        if name in MAY_CHANGE:
            continue
        old, new = before.get(name), now[name]
        if name == "deepspeed":
            old, new = ({k: v.get(k) for k in FIXED_DS_KEYS} for v in (old, new))
        for path, was, found in _differences((name,), old, new):
            what = as_flag(path[-1])
            if path[0] == "deepspeed":
                what = f'"{".".join(path[1:])}" of --deepspeed_config'
            raise UserError(
                f"{what} is {found}, but {config.output} was started with {was}; "
                "use that, or another --output"
            )
    return config


def _differences(path: tuple[str, ...], old, new):
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**new, **old}:
            yield from _differences((*path, key), old.get(key), new.get(key))
    elif old != new:
        yield path, old, new


def as_json(config: RunConfig) -> dict:
    """The resolved configuration as plain JSON values."""
    return json.loads(json.dumps(asdict(config)))


def write_run_files(config: RunConfig) -> None:
    """RUN/config.json, and the vocabulary, so that RUN is all that an export needs."""
    from albert_ds.data.shards import open_shards
    from albert_ds.runtime.versions import read_versions

    temporary = config.run / ".config.json.tmp"
    record = {**as_json(config), "versions": read_versions()}
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, config.run / "config.json")
    open_shards(config.data[0], "train").vocab.write(config.run)
