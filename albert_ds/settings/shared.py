"""What the configurations of pretraining and fine-tuning share: flags, and RUN/config.json.

RUN/config.json holds every field of the resolved configuration. A resumed run must have the values
that stand there, except for the fields whose flag says `may_change`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from albert_ds import __version__
from albert_ds.base.cli import (
    Flag,
    Range,
    as_flag,
    find_word,
    flag,
    integer,
    non_negative,
    path,
    peek_output,
    positive,
)
from albert_ds.base.errors import UserError, hide_passwords
from albert_ds.base.files import PACKAGE, write_file
from albert_ds.base.json_files import check, read_json
from albert_ds.base.plugin import COPY, EXECUTED, PLUGIN, load_plugin
from albert_ds.base.schedules import learning_rate
from albert_ds.checkpoint.run_folder import read_versions
from albert_ds.data.stream_config import BATCH_SIZE, gradient_accumulation_steps
from albert_ds.engine.deepspeed_config import (
    check_device,
    check_eight_bits,
    read_ds_config,
    resolve_ds_config,
)
from albert_ds.model.config import ModelConfig

if TYPE_CHECKING:
    from albert_ds.checkpoint.model_folder import ModelFolder

# Of DeepSpeed's JSON only these change results; the rest is layout.
FIXED_DS_KEYS = ("optimizer", "gradient_clipping", "bf16", "fp16")
WHAT = "what to run"
OPTIMIZATION = "optimization"
LAYOUT = "layout (changes no number but, in 16 bits on CUDA, what attention drops)"
RHYTHM = "rhythm"
# The flags of each; what changes no number may change in a resumed run.
what, optimization = partial(flag, group=WHAT), partial(flag, group=OPTIMIZATION)
layout = partial(flag, group=LAYOUT, may_change=True)
rhythm = partial(flag, group=RHYTHM, may_change=True)

# Ranks on several machines may have other values of these; the content of folders is compared.
LOCAL = ('"command" of config.json', "--data", "--deepspeed_config", "--num-workers", "--plugin")
FREE = ("command", "schedules")  # a resumed run may have others: of schedules, for steps to come
BEFORE = {"word_boundaries": "released"}  # what versions without the field did, if not its default
DATA = "--data (sha256 of its shards)"
WEIGHTS = ("--init-from", "--checkpoint", "--from-task", "--teacher")

# It fills a part of `deepspeed`.
LEARNING_RATE = Flag(
    help='peak learning rate, taken where DeepSpeed\'s JSON says "auto"',
    type=Range(ge=0, le=10),
    metavar="RATE",
    group=OPTIMIZATION,
)

EPOCHS = Flag(
    help="passes over the data, in place of --steps",
    type=Range(gt=0, le=10**6),
    metavar="EPOCHS",
    shown_default="as --steps says",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedOpened:
    """What the command line names and `read_config` has opened, so that nothing is opened twice."""

    ds_config: dict  # DeepSpeed's JSON, as the file has it
    models: dict[str, ModelFolder]  # by flag: the weights that a new run starts from


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedConfig:
    """The fields of every run of the trainer."""

    command: str = ""  # as typed
    output: str = what(
        "folder of this run; given again, the run resumes", "RUN", path, may_change=True
    )
    model: ModelConfig
    steps: int = what(
        "optimizer steps of the whole run", "STEPS", integer(1, 10**9), may_change=True
    )
    batch_size: int = what(
        "samples of one optimizer step, all ranks together", "SAMPLES", BATCH_SIZE
    )
    micro_batch_size: int = what(
        "samples of one forward and backward pass on one rank",
        "SAMPLES",
        integer(1, 1 << 20),
        may_change=True,
    )
    warmup_steps: int = optimization(
        "steps of linear warm-up",
        "STEPS",
        integer(0, 10**9),
        shown_default="2.5 % of --steps",
    )
    deepspeed_config: str = what(
        "DeepSpeed's JSON: ZeRO stage, precision, clipping, optimizer (see ds_configs/)",
        "FILE",
        path,
        name="--deepspeed_config",
        may_change=True,
    )
    plugin: str | None = flag(PLUGIN, default=None, group=WHAT, may_change=True)
    plugin_sha256: str | None = None
    deepspeed: dict  # the JSON with every "auto" that the command line owns filled in
    tensor_parallel: int = layout(
        "ranks that each block is split over", "RANKS", integer(1, 1 << 16), default=1
    )
    deterministic: bool = layout(
        "on CUDA: use only algorithms that give the same bits in every run; they are slower",
        default=False,
    )
    log_every: int = rhythm(
        "steps from one line of metrics.jsonl to the next", "STEPS", positive, default=10
    )
    eval_every: int = rhythm(
        "steps from one evaluation to the next", "STEPS", positive, default=1000
    )
    save_every: int = rhythm(
        "steps from one checkpoint to the next", "STEPS", positive, default=1000
    )
    max_hours: float | None = rhythm(
        "stop with a complete checkpoint after this time",
        "HOURS",
        Range(gt=0, le=24 * 366),
        default=None,
        shown_default="no limit",
    )
    timeout_minutes: float = rhythm(
        "stop when a rank is missing or delays the others for this time",
        "MINUTES",
        Range(gt=0, le=7 * 24 * 60),
        default=10,
    )

    @property
    def run(self) -> Path:
        return Path(self.output)

    @property
    def learning_rate(self) -> float:
        """The peak."""
        return self.deepspeed["optimizer"]["params"]["lr"]

    def samples_at(self, step: int) -> int:
        """The position in the data after `step` steps."""
        return step * self.batch_size

    def rate_at(self, step: int) -> float:
        """Learning rate of the update that follows `step` finished steps."""
        return learning_rate(
            step, peak=self.learning_rate, warmup_steps=self.warmup_steps, num_steps=self.steps
        )


def take_plugin(argv: list[str], before: dict | None) -> str | None:
    """Execute the file of --plugin; its sha256, None without one.

    before: what `read_previous` has read. Raises UserError if the file fails, and if RUN was
    started with another, or with none.
    """
    sha256 = load_plugin(find_word(argv, "--plugin"))
    run = peek_output(argv)
    was = before.get("plugin_sha256") if before is not None else sha256
    if was is None and sha256 is not None:
        raise UserError(f"--plugin: {run} was started without one; use none, or another --output")
    if was != sha256:
        raise UserError(
            f"--plugin: must be the one that {run} was started with, sha256 {_shorten(was)}; "
            f"{COPY} in it is a copy"
        )
    return sha256


def resolve_deepspeed(
    args, model: ModelConfig, *, world_size: int, default_learning_rate: float
) -> tuple[int, dict, dict]:
    """The micro-batch size (default: a rank's whole share), DeepSpeed's JSON as the file has it,
    and filled in.

    Raises UserError if the batch cannot be split so, or if the JSON is wrong.
    """
    check_tensor_parallel(args.tensor_parallel, model, world_size)
    ranks = world_size // args.tensor_parallel
    micro = args.micro_batch_size or max(1, args.batch_size // ranks)
    accumulation = gradient_accumulation_steps(args.batch_size, micro, ranks)
    file = Path(args.deepspeed_config)
    ds_config = read_ds_config(file)
    resolved = resolve_ds_config(
        ds_config,
        batch_size=args.batch_size,
        micro_batch_size=micro,
        accumulation=accumulation,
        learning_rate=args.learning_rate,
        default_learning_rate=default_learning_rate,
    )
    check_device(file, resolved, tensor_parallel=args.tensor_parallel)
    check_eight_bits(file, resolved, model, tensor_parallel=args.tensor_parallel)
    return micro, ds_config, resolved


def check_tensor_parallel(tensor_parallel: int, model: ModelConfig, world_size: int) -> None:
    """Raise UserError if `tensor_parallel` does not divide the ranks, heads and FFN size."""
    sizes = {
        "the number of ranks": world_size,
        "--num-heads": model.num_heads,
        "--ffn-size": model.ffn_size,
    }
    for what, size in sizes.items():
        if size % tensor_parallel:
            allowed = [t for t in range(1, size + 1) if size % t == 0]
            raise UserError(
                f"--tensor-parallel {tensor_parallel} does not divide {what} {size}; "
                f"allowed: {', '.join(map(str, allowed[:8]))}"
            )


def resolve_warmup(typed: int | None, steps: int, default: int) -> int:
    """The warm-up that was typed, or `default`. Raises UserError if it is longer than the run."""
    if typed is not None and typed > steps:
        raise UserError(f"--warmup-steps {typed}: must be at most --steps {steps}")
    return default if typed is None else typed


def join_command(name: str, argv: list[str]) -> str:
    """The command line as the user typed it: a launcher adds --local_rank."""
    typed = [word for word in argv if not word.startswith("--local_rank")]
    return shlex.join(["albert-ds", name, *typed])


def as_json(config: SharedConfig) -> dict:
    """The resolved configuration as plain JSON values."""
    return json.loads(json.dumps(asdict(config)))


def write_config(config: SharedConfig, **facts: str | int) -> None:
    """Write RUN/config.json: the configuration, `facts`, and the versions of what runs it.

    And a copy of the plugin, which may be gone when RUN is read.
    """
    config.run.mkdir(parents=True, exist_ok=True)
    if config.plugin_sha256 and not (config.run / COPY).exists():
        write_file(config.run / COPY, EXECUTED[config.plugin_sha256])
    record = {**as_json(config), **facts, "versions": read_versions()}
    # A URL of --data may hold a password.
    write_file(config.run / "config.json", hide_passwords(json.dumps(record, indent=1)) + "\n")


def read_previous(run: Path | None) -> dict | None:
    """What RUN/config.json holds; None where RUN has not been started, or is not named."""
    if run is None or not (path := run / "config.json").exists():
        return None
    before = read_json(path, f"--output {run}: {path}")
    schema: dict[str, Any] = {"stream": dict, "deepspeed": dict, "depth_schedule": (str, None)}
    schema |= {"warmup_steps": non_negative, "versions": dict}
    check({key: before[key] for key in schema if key in before}, schema, str(path), is_closed=True)
    return before


def check_resume(config: SharedConfig, before: dict | None, ds_config: dict) -> None:
    """Raise UserError for the first value that differs from `before` and may not change.

    before: what `read_previous` has read. ds_config: the content of --deepspeed_config.
    """
    if before is None:
        if any(config.run.glob("checkpoints/step-*")):
            raise UserError(
                f"--output {config.output}: has checkpoints and no config.json; put that of their "
                "run beside them, or name another folder"
            )
        return
    written = str(before.get("versions", {}).get("albert-ds", ""))
    if _as_numbers(written) > _as_numbers(__version__):
        raise UserError(
            f"--output {config.output}: was written by albert-ds {written}, which is newer than "
            f"{__version__}; use that, or another --output"
        )
    now = as_json(config)
    kind, own = ("fine-tuning", "task") if "task" in now else ("pretraining", "stream")
    if own not in before:
        raise UserError(
            f"--output {config.output}: its config.json is of no {kind} run; must be new"
        )
    old, new = (
        {
            name: value
            for name, value, may_change in _name_values(config, record, ds_config)
            if not may_change
        }
        for record in (before, now)
    )
    # By flags first: what follows from a flag has a longer name.
    for name in sorted({**new, **old}, key=lambda name: not name.startswith("--")):
        was, is_now = old.get(name, "nothing"), new.get(name, "nothing")
        if was != is_now:
            place = f" (--data {shlex.join(before.get('data', ()))})" if name == DATA else ""
            raise UserError(
                f"{name} is {_shorten(is_now)}, but {config.output} was started with "
                f"{_shorten(was)}{place}; use that, or another --output"
            )


def fingerprint(config: SharedConfig, opened: SharedOpened, world_size: int) -> str:
    """A hash of what must be the same on all ranks; empty for one rank.

    It is of the resolved configuration, the number of ranks, the program itself, and the weights
    that a new run starts from.
    """
    if world_size == 1:
        return ""
    code = b"".join(source.read_bytes() for source in sorted(PACKAGE.rglob("*.py")))
    named = _name_values(config, as_json(config), opened.ds_config)
    values = {name: value for name, value, _ in named if name not in (*LOCAL, *WEIGHTS)}
    if not (config.run / "checkpoints").is_dir():
        values |= {name: folder.checksum for name, folder in opened.models.items()}
    values |= {"--output": os.path.abspath(config.output), "WORLD_SIZE": world_size}
    return hashlib.sha256(code + json.dumps(values).encode()).hexdigest()


def _as_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _shorten(value: Any) -> str:
    """The text of a value, with 12 digits of each sha256 in it."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", str(value))


def _value_before(declared: Field) -> Any:
    """What runs had in whose versions there was no such field: its default, or as BEFORE says."""
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    default = "nothing" if declared.default is MISSING else declared.default
    return BEFORE.get(declared.name, default)


def _name_values(
    config, record: dict, ds_config: dict, path: str = ""
) -> Iterator[tuple[str, Any, bool]]:
    """(name, value, may_change) of all of `record`, which is the JSON of `config` or of an earlier
    one; a value is named by its flag where it has one."""
    for declared in fields(config):
        its_flag: Flag | None = declared.metadata.get("flag")
        inner = getattr(config, declared.name)
        here = f"{path}{declared.name}"
        value = record.get(declared.name, _value_before(declared))
        if declared.name == "deepspeed" and isinstance(value, dict):
            yield from _name_deepspeed(ds_config, value)
        elif declared.name == "features" and isinstance(value, dict):
            for split, key in value.items():
                yield f"the {split} set of --data (sha256)", str(key)[:12], False
        elif is_dataclass(inner) and isinstance(value, dict):
            yield from _name_values(inner, value, ds_config, f"{here}.")
        elif declared.name == "data_sha256":
            yield DATA, value, False
        elif declared.name == "plugin_sha256":
            yield "--plugin (sha256)", value, False
        elif declared.name == "teacher_crc32":
            yield "--teacher (CRC-32 of its weights)", value, False
        elif its_flag is None:
            yield f'"{here}" of config.json', value, declared.name in FREE
        else:
            yield its_flag.name or as_flag(declared.name), value, its_flag.may_change


def _name_deepspeed(ds_config: dict, record: dict) -> Iterator[tuple[str, Any, bool]]:
    typed = ds_config["optimizer"].get("params", {})
    for keys, value in _leaves((), record):
        name = f'"{".".join(keys)}" of --deepspeed_config'
        # Where the JSON leaves the rate to the command line, that is where it was changed.
        if keys == ("optimizer", "params", "lr") and typed.get("lr", "auto") == "auto":
            name = "--learning-rate"
        yield name, value, keys[0] not in FIXED_DS_KEYS


def _leaves(path: tuple[str, ...], value) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves((*path, key), value[key])
    else:
        yield path, value
