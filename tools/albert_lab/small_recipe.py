"""The recipe of `albert-ds learn`: a small model on this machine, in the hours given.

Its flags, the layouts that are tried here, and what follows from a measured speed: the batch and
the number of steps, so that the learning rate reaches 0 as the time ends.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import fmean

import psutil
import yaml

from albert_ds.base.cli import Range, log_line
from albert_ds.base.errors import ENDINGS, MachineFailed, Stopped, UserError
from albert_ds.base.files import PACKAGE, write_json
from albert_ds.base.json_files import read_json, read_lines
from albert_lab.ranks import take_port

COMMAND = (sys.executable, "-m", "albert_ds")
LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner")
# Twice the usual masks are twice the signal of a token, and three layers are twice the steps of six
# in the time (docs/notebook/recipe_trials.md).
FLAGS = yaml.safe_load((PACKAGE / "recipes" / "small.yaml").read_text())
SHAPE = ("model", "embedding-size", "hidden-size", "num-layers", "num-heads")
PIECES = 12_000
LENGTH = FLAGS["sequence-length"]
HOLDOUT = 0.02  # share of the documents
# Of less text more is held out, at most a tenth: this is about 20,000 tokens, and 3,000 masked ones
# tell a point.
HELD_OUT_BYTES = 100_000
LARGEST_HOLDOUT = 0.1
BATCH = FLAGS["batch-size"]  # of the trials of speed, and of runs too short for a larger one
LARGER = (64, 128)  # the largest that gets LEAST_STEPS
LEAST_STEPS = 6000
OF_LAYOUT = ("batch-size", "micro-batch-size")
SIZE = [word for name in SHAPE for word in (f"--{name}", str(FLAGS[name]))]
RECIPE = [
    word
    for name, value in FLAGS.items()
    if name not in (*SHAPE, *OF_LAYOUT)
    for word in (f"--{name}", str(value))
]
WARMUP_STEPS = 200  # at least, but where there are fewer than 1,000 steps
MEASURED_STEPS, LOGGED_STEPS = 40, 4  # of a trial
TRAINING_SHARE = 0.96  # of the time; the rest goes to evaluations and checkpoints
HOURS = Range(gt=0, le=10_000)
FEWEST_STEPS = 20
STOPS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Layout:
    """How this machine runs the recipe."""

    ranks: int
    threads: int
    ds_config: str
    batch: int = BATCH

    @property
    def precision(self) -> str:
        return "bf16" if "bf16" in self.ds_config else "fp32"

    @property
    def flags(self) -> list[str]:
        """Those of the trainer. A rank takes all its samples at once: in parts takes longer."""
        batches = ("--batch-size", self.batch, "--micro-batch-size", self.batch // self.ranks)
        return [*map(str, batches), "--deepspeed_config", str(PACKAGE / self.ds_config)]

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks x {self.threads} threads, {self.precision}, {self.batch} samples "
            "a step"
        )


def run(command: Sequence[object], log: Path, threads: int = 1) -> str:
    """Run one of the package's commands and return its stdout; its stderr goes to `log`."""
    words = [str(word) for word in command]
    with log.open("a") as file, start(words, threads, stdout=subprocess.PIPE, stderr=file) as ran:
        out, _ = ran.communicate()
    check(ran.returncode, words, log)
    return out


@contextmanager
def start(words: list[str], threads: int, **streams) -> Generator[subprocess.Popen]:
    """A process that ends with this block: a trainer saves a checkpoint if it still trains."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(words, env=environ, text=True, **streams)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def check(code: int, words: list[str], log: Path) -> None:
    """Raise the error of a command that ended with this code, with the last line that it wrote."""
    if code:
        tail = "".join(log.read_text(errors="replace").strip().splitlines()[-1:])
        name = words[words.index("albert_ds") + 1] if "albert_ds" in words else "train"
        reason = f"{name} ended with {code}; see {log}: {tail.removeprefix('albert-ds: ')}"
        raise {ending.code: ending for ending in ENDINGS}.get(code, MachineFailed)(reason)


def stop(number: int, frame: object) -> None:
    """A signal ends what was started, even what `start` does not hold yet, and unwinds."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    started = psutil.Process().children(recursive=True)  # a launcher is gone before its ranks are
    for child in psutil.Process().children():
        child.terminate()
    psutil.wait_procs(started)
    raise Stopped("stopped; the same command continues")


def text_flags(names: Sequence[str], text_field: str, language: str) -> list[str]:
    """What `vocab` and `shards` read."""
    return ["--input", *names, "--text-field", text_field, "--language", language]


def vocab_command(text: list[str], output: Path, pieces: int = PIECES) -> list[str]:
    """`text`: of `text_flags`."""
    return [*COMMAND, "vocab", *text, "--output", str(output), "--vocab-size", str(pieces)]


def choose_holdout(size: float) -> float:
    """The share of documents to hold out of text of `size` bytes; 0: it is not known."""
    if not size:
        return HOLDOUT
    return round(min(max(HOLDOUT, HELD_OUT_BYTES / size), LARGEST_HOLDOUT), 2)


def shards_command(
    text: list[str], vocab: Path, output: Path, *, holdout: float, length: int = LENGTH
) -> list[str]:
    words = [*COMMAND, "shards", *text, "--vocab", str(vocab), "--output", str(output)]
    return [*words, "--sequence-length", str(length), "--holdout", str(holdout)]


def start_command(data: Path, output: Path, seed: int) -> list[str]:
    """Writes weights whose attention begins at the neighbouring tokens."""
    command = [
        sys.executable,
        "-m",
        "albert_lab.neighbours",
        *SIZE,
        *RECIPE,
        *schedule(FEWEST_STEPS),
    ]
    command += Layout(1, 1, "ds_configs/zero1_fp32_muon.json").flags
    return [*command, "--seed", str(seed), "--data", str(data), "--output", str(output)]


def recipe(start: Path, seed: int) -> list[str]:
    """The flags of what is trained in any layout, from the weights of a folder."""
    return [*RECIPE, "--init-from", str(start), "--seed", str(seed)]


def trainer(
    flags: Sequence[str], layout: Layout, data: Path, output: Path, port: int | None = None
) -> list[str]:
    """The command that trains `recipe`'s flags in a layout, without --steps.

    port: where its ranks meet (None: DeepSpeed's default).
    """
    command = [*COMMAND, "train"]
    if layout.ranks > 1:
        at = [] if port is None else ["--master_port", str(port)]
        command = [*LAUNCHER, "--num_gpus", str(layout.ranks), *at, "--module", "albert_ds.train"]
    return [*command, *flags, *layout.flags, "--data", str(data), "--output", str(output)]


def measure(flags: Sequence[str], layout: Layout, data: Path, folder: Path) -> float:
    """Mean seconds of a step in a layout; infinite where the layout does not run."""
    name = f"{layout.ranks}x{layout.threads}-{Path(layout.ds_config).stem}-{layout.batch}"
    command = trainer(flags, layout, data, folder / name, take_port())
    steps, every = str(MEASURED_STEPS), str(LOGGED_STEPS)
    rhythm = ["--steps", steps, "--log-every", every, "--eval-every", steps, "--eval-samples", "2"]
    try:
        run([*command, *rhythm], folder / f"{name}.log", layout.threads)
    except (UserError, MachineFailed) as error:
        if "in use by" in str(error):  # which says nothing of the layout
            raise
        log_line(f"{layout}: does not run here: {error}")
        return float("inf")
    records = read_lines(folder / name / "metrics.jsonl")
    seconds = [r["step_seconds"] for r in records if "step_seconds" in r]
    mean = fmean(seconds[len(seconds) // 2 :])  # the first half warms up: kernels for new shapes
    print(f"  {layout}: {layout.batch / mean:.0f} samples/s", flush=True)
    return mean


def wait_for_orphans(folder: Path) -> None:
    """Wait for trials in this folder whose `learn` was killed: they would slow down its own."""
    begin = f"{folder}{os.sep}"
    commands = {each: each.info["cmdline"] or () for each in psutil.process_iter(["cmdline"])}
    processes = [
        process
        for process, words in commands.items()
        if "--output" in words and any(word.startswith(begin) for word in words)
    ]
    if processes:
        names = ", ".join(str(process.pid) for process in processes)
        log_line(f"waiting for trials that a killed command has left running (processes {names})")
        psutil.wait_procs(processes)


def fit_steps(hours: float, seconds: float) -> int:
    """The steps of so many seconds that the time is enough for, or the fewest that are a run."""
    return max(FEWEST_STEPS, int(hours * 3600 * TRAINING_SHARE / seconds))


def choose_layout(
    flags: Sequence[str], data: Path, output: Path, hours: float
) -> tuple[Layout, float]:
    """The fastest layout on this machine, with its batch, and the seconds of a step; kept."""
    path = output / "layout.json"
    if not path.is_file():
        folder = output / "trials"
        folder.mkdir(exist_ok=True)
        wait_for_orphans(folder)
        cores = len(os.sched_getaffinity(0))
        shapes = {(1, cores), (cores, 1)} if BATCH % cores == 0 else {(1, cores)}
        configs = ("ds_configs/zero1_fp32_muon.json", "ds_configs/zero1_bf16_muon.json")
        layouts = [Layout(*shape, config) for shape in sorted(shapes) for config in configs]
        times = {layout: measure(flags, layout, data, folder) for layout in layouts}
        best = min(times, key=lambda layout: times[layout])
        seconds = times[best]
        if larger := [b for b in LARGER if fit_steps(hours, seconds * b / BATCH) >= LEAST_STEPS]:
            best = replace(best, batch=larger[-1])
            seconds = measure(flags, best, data, folder)
        if seconds == float("inf"):
            raise MachineFailed(f"no layout trains on this machine; see {folder}")
        write_json(path, {"layout": astuple(best), "seconds": seconds})
    content = read_json(path)
    return Layout(*content["layout"]), content["seconds"]


def schedule(steps: int) -> list[str]:
    """The flags of a run of that many steps."""
    warmup = max(steps // 40, min(WARMUP_STEPS, steps // 5))
    return ["--steps", str(steps), "--warmup-steps", str(warmup)]


def rhythm(steps: int) -> list[str]:
    """How often a run of that many steps logs, evaluates and saves."""
    every = max(1, steps // 200)
    flags = ["--log-every", str(every), "--eval-every", str(5 * every), "--eval-samples", "1024"]
    return [*flags, "--save-every", str(10 * every)]
