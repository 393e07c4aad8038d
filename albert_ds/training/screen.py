"""What a run shows: facts at its start, a line an interval, and at the end what to do next.

Records and facts go to stdout. Messages (`cli.log_line`) and the progress bar of a terminal go to
stderr.
"""

import sys
import time
from collections.abc import Callable

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from albert_ds.base.errors import hide_passwords
from albert_ds.engine.deepspeed_config import count_reductions, has_eight_bits, precision_of
from albert_ds.parallel.consensus import gather_hosts
from albert_ds.training.run import TrainingRun

# Of a line: a key of metrics.jsonl, its heading and its format.
COLUMNS = {"loss": ("loss", "7.4f"), "lr": ("lr", "7.1e"), "grad_norm": ("norm", "7.2g")}


def print_header(run: TrainingRun, work: str, size: str, facts: dict[str, str]) -> None:
    """Show what `work` is done on a model of a `size`, where, and further facts. Collective."""
    config = run.config
    num_nodes = len({*gather_hosts(run.mesh)})
    if run.mesh.rank == 0:
        title = f"{work}: {config.output}, {run.step:,} of {config.steps:,} steps done"
        print_facts(title, describe_run(size, run, num_nodes=num_nodes) | facts)


def describe_run(size: str, run: TrainingRun, *, num_nodes: int) -> dict[str, str]:
    """The facts that pretraining and fine-tuning have alike.

    size: the name of the model. The engine holds the whole model, also if layers come step by step.
    """
    model = run.config.model
    mesh = run.mesh
    deepspeed = run.engine.deepspeed
    held, used = _count_elements(run, tensor_parallel=1)
    precision = precision_of(run.config.deepspeed)
    micro_batch_size = deepspeed.train_micro_batch_size_per_gpu()
    return {
        "model": f"{size}, {model.num_layers} layers of width {model.hidden_size}, sharing "
        f"{model.sharing}",
        "parameters": f"{held:,}; {used:,} if counted as often as layers use them",
        "layout": f"{_count(mesh.world_size, 'rank')} ({deepspeed.device.type}) on "
        f"{_count(num_nodes, 'node')} = {mesh.tp_size} tensor-parallel x {mesh.dp_size} "
        f"data-parallel; ZeRO-{run.engine.stage}",
        "precision": precision
        + ", the blocks' products in fp8" * has_eight_bits(run.config.deepspeed)
        + ", with fp32 master weights" * (precision != "fp32"),
        "batch": f"{_count(deepspeed.train_batch_size(), 'sample')} a step = micro-batch "
        f"{micro_batch_size} x {_count(mesh.dp_size, 'data-parallel rank')} x accumulation "
        f"{deepspeed.gradient_accumulation_steps()}",
        "gradients": _describe_reduction(run),
    }


def _describe_reduction(run: TrainingRun) -> str:
    """What a rank sends its data-parallel peers to sum, in an optimizer step."""
    mesh = run.mesh
    deepspeed = run.engine.deepspeed
    if mesh.dp_size == 1:
        return "reduced over one data-parallel rank: nothing is sent"
    times = count_reductions(run.engine.stage, deepspeed.gradient_accumulation_steps())
    width = times * deepspeed.communication_data_type.itemsize
    held, used = (width * x / 1e6 for x in _count_elements(run, tensor_parallel=mesh.tp_size))
    return f"{held:,.1f} MB of a rank reduced a step; {used:,.1f} MB if no layers shared a block"


def _count_elements(run: TrainingRun, *, tensor_parallel: int) -> tuple[int, int]:
    """The parameters of a rank; and with a block of each kind for each layer, shared or not."""
    model = run.config.model
    engine = run.engine
    held = 0
    blocks = {"albert.encoder.attention.": 0, "albert.encoder.ffn.": 0}
    for name, shape in engine.shapes.items():
        size = shape.numel() // (1 if engine.shard_dims[name] is None else tensor_parallel)
        held += size
        for kind in blocks:
            blocks[kind] += size * name.startswith(kind)
    each = [size // num for size, num in zip(blocks.values(), model.num_blocks, strict=True)]
    return held, held - sum(blocks.values()) + model.num_layers * sum(each)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def print_facts(title: str, facts: dict[str, str]) -> None:
    """Print a title, and below it one line a fact."""
    text = "\n".join([title, *(f"  {name:11} {value}" for name, value in facts.items())])
    print(hide_passwords(text), flush=True)


def format_step(step: int, num_steps: int, values: dict, seconds_left: float | None = None) -> str:
    """A record of metrics as a line of at most 120 columns (to 999,999 steps, no further losses).

    Lines of the same kind stand in columns. A value that does not exist is "-".
    """
    line = f"step {step:{len(str(num_steps))}} of {num_steps}"
    skipped = values.get("skipped_steps")
    if skipped:
        line = f"{line}  {_count(skipped, 'step')} skipped: the gradient was not finite\n{line}"
    if any(key.startswith("dev_") for key in values):
        scores = (f"  {key[4:]} {_fit(value, '.4f')}" for key, value in values.items())
        return f"{line}  dev{''.join(scores)}"
    held_out = "heldout_loss" in values
    values = {key.removeprefix("heldout_"): value for key, value in values.items()}
    tasks = [key.removesuffix("_loss") for key in values if key.endswith("_loss")]
    for task in tasks:
        line += f"  {task} {_fit(values[f'{task}_loss'], '6.3f')}"
        if f"{task}_accuracy" in values:
            line += f" {_fit(values[f'{task}_accuracy'], '6.1%')}"
    if held_out:
        return f"{line}  held out"
    if tasks:
        del values["loss"]  # it is the sum of the tasks' losses
    for key, (name, form) in COLUMNS.items():
        if key in values:
            line += f"  {name} {_fit(values[key], form)}"
    if "tokens_per_second" in values:
        line += f"  {tqdm.format_sizeof(values['tokens_per_second']):>5} tok/s"
    if values.get("mfu") is not None:
        line += f"  mfu {values['mfu']:3.0%}"
    return line if seconds_left is None else f"{line}  left {_as_time(seconds_left):>6}"


def _fit(value: float | None, form: str) -> str:
    """A number; "-" of the same width if there is none."""
    return f"{'-':>{len(format(0.0, form))}}" if value is None else format(value, form)


def _as_time(seconds: float) -> str:
    """At most six characters, rounded to two or three digits."""
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        if round(seconds / size) < 100:
            return f"{seconds / size:.{int(unit == 'h')}f} {unit}"
    return f"{seconds / 86400:.0f} d"


class Screen:
    """The lines of rank 0 while it trains. On a terminal a progress bar stays the last one.

    work_of: the work of the first n steps in any unit, for the time left; all steps alike unless
    given. It is measured from the end of the first step on, which is slower than all others.
    """

    def __init__(self, *, step: int, num_steps: int, work_of: Callable[[int], float] = int):
        self._num_steps, self._work_of = num_steps, work_of
        self._since: tuple[int, float] | None = None
        self._bar = None
        self._streams = (sys.stdout, sys.stderr)
        if sys.stderr.isatty():
            tqdm.monitor_interval = 0  # no thread: loader workers are forked
            self._bar = tqdm(
                total=num_steps, initial=step, unit="step", file=sys.stderr, dynamic_ncols=True
            )
            # Whatever is printed goes above the bar.
            sys.stderr = DummyTqdmFile(sys.stderr)
            if sys.stdout.isatty():
                sys.stdout = sys.stderr

    def advance(self, step: int) -> None:
        """Move the bar; after the second step, the first one measured, say how long all take."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
        if self._since is None:
            self._since = step, time.perf_counter()
        elif step == self._since[0] + 1 < self._num_steps:
            left = f"{_as_time(self._measure_left(step))} for the other {self._num_steps - step:,}"
            condition = f"if all are as fast as step {step:,}; evaluation and saving not counted"
            print(f"  {'time':11} {left} steps, {condition}", flush=True)

    def _measure_left(self, step: int) -> float:
        """Seconds to the last step, by the steps since the first."""
        assert self._since is not None
        (first, started), now = self._since, time.perf_counter()
        to_do = self._work_of(self._num_steps) - self._work_of(step)
        return to_do * (now - started) / (self._work_of(step) - self._work_of(first))

    def write(self, step: int, values: dict) -> None:
        """Print a record of metrics, and the time left at the pace since the first step."""
        is_measured = "lr" in values and self._since is not None and step > self._since[0]
        left = self._measure_left(step) if is_measured else None
        print(format_step(step, self._num_steps, values, left), flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            sys.stdout, sys.stderr = self._streams
