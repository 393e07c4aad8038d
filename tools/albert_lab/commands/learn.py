"""Pretrain a small ALBERT in the hours given, on this machine, and report what it has learned.

Text -> vocabulary -> shards -> pretraining -> held-out metrics, minimal pairs, small tasks ->
OUTPUT/report.md. Given the same --output again, it goes on where it stopped. The batch and the
number of steps come from the measured speed, once; so the learning rate reaches 0 as the time ends,
and a resumed run is the same run.

albert-ds learn --text wiki/*.txt --output learn --hours 2
"""

import os
import shlex
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

from albert_ds.base import cli
from albert_ds.base.cli import Range, log_line
from albert_ds.base.errors import ENDINGS, MachineFailed, Stopped, UserError
from albert_ds.base.files import PACKAGE, check_folder, write_file, write_json
from albert_ds.base.json_files import read_json, read_lines
from albert_ds.base.locks import FileLock
from albert_ds.base.storage import find_files, is_url, refuse_within, stat
from albert_ds.data.stream_config import StreamConfig
from albert_ds.process.world import name_device
from albert_ds.settings.finetune import FinetuneConfig
from albert_lab.ranks import take_port
from albert_lab.tables import count_steps, spread, table

COMMAND = (sys.executable, "-m", "albert_ds")
# Twice the usual masks are twice the signal of a token, and three layers are twice the steps of six
# in the time (docs/notebook/recipe_trials.md).
FLAGS = yaml.safe_load((PACKAGE / "recipes" / "small.yaml").read_text())
SHAPE = ("model", "embedding-size", "hidden-size", "num-layers", "num-heads")
PIECES, LENGTH = 8000, FLAGS["sequence-length"]
BATCH = FLAGS["batch-size"]  # of the trials of speed, and of runs too short for a larger one
LARGER, LEAST_STEPS = (64, 128), 6000  # the largest that gets so many steps
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
# Small tasks: folder, steps and batch. Small models begin late: in 500 steps CoLA is still at one
# class and STS-B has hardly begun.
TASKS = {
    "cola": ("CoLA", 2000, 32),
    "sst2": ("SST-2", 2000, 32),
    "mrpc": ("MRPC", 700, 16),
    "rte": ("RTE", 500, 16),
    "stsb": ("STS-B", 3600, 16),
}
TUNING_RATE = "3e-4"
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


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add
    text = "files, folders or URLs of text, as `albert-ds vocab --input` takes them"
    add("--text", text, "FILE", cli.path, nargs="+", required=True)
    text = "the field of JSON lines or the column of a table that holds the text"
    add("--text-field", text, "NAME", default="text")
    add("--output", "folder for all that it makes", "DIR", Path, required=True)
    hours = Range(gt=0, le=10_000)
    add("--hours", "time of the pretraining", "HOURS", hours, default=2.0)
    add("--language", "language of the text", "CODE", default="en")
    size = f"pieces of the vocabulary (default: {PIECES}, or those of --init-from)"
    add("--vocab-size", size, "PIECES", cli.positive)
    text = "begin with the weights and the vocabulary of a run or of an export: more hours, in "
    text += "another --output (default: random weights)"
    add("--init-from", text, "RUN_OR_HF", cli.path)
    text = "seed of the pretraining; a third time take 2 (default: 0, with --init-from 1)"
    add("--seed", text, "N", cli.flags_of(StreamConfig)["seed"].type)
    text = "folder of minimal pairs, as BLiMP's data/ (default: none)"
    add("--minimal-pairs", text, "FOLDER", Path)
    names = ", ".join(name for name, *_ in TASKS.values())
    steps = sum(steps for _, steps, _ in TASKS.values())
    text = f"folder with GLUE's {names}: {steps:,} more steps for each of --seeds, from the model "
    text += "and from random weights (default: none)"
    add("--tasks", text, "FOLDER", Path)
    runs = cli.flags_of(FinetuneConfig)["seeds"].type
    add("--seeds", "runs of each task", "RUNS", runs, default=3)
    return parser


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


def find_vocab(initial: Path) -> Path:
    """The vocabulary of --init-from; UserError unless the recipe can begin with its weights."""
    from albert_ds.checkpoint.initial import find_origins
    from albert_ds.checkpoint.model_folder import ModelFolder

    folder = ModelFolder(initial)
    vocab, config = folder.root / "spiece.model", folder.config
    if not vocab.is_file():
        raise UserError(f"--init-from {initial}: no {vocab.name} in it")
    find_origins(folder, replace(config, pair_head=True))
    if config.max_position_embeddings < LENGTH:
        places = f"has {config.max_position_embeddings} positions; must be at least {LENGTH}"
        raise UserError(f"--init-from {initial}: {places}")
    return vocab


def _locate(name: str) -> str:
    return name if is_url(name) else os.path.abspath(name)


def keep_settings(args) -> None:
    """Raise UserError if what is in OUTPUT was made of other text or settings; note them."""
    path = args.output / "settings.json"
    names = ("hours", "language", "text_field", "vocab_size", "seed")
    found = {name: getattr(args, name) for name in names}
    for name in ("init_from", "minimal_pairs"):
        found[name] = (folder := getattr(args, name)) and str(folder)
    found["text"] = [[_locate(name), *stat(name)] for name in find_files(args.text)]
    is_begun = any((args.output / name).exists() for name in ("vocab", "data"))
    known = read_json(path) if is_begun else {}
    for name, before in known.items():
        is_later = name == "minimal_pairs" and None in (before, found[name])
        if found[name] != before and not is_later:
            what = "the text has changed" if name == "text" else f"was {before}"
            raise UserError(
                f"{cli.as_flag(name)}: {what}, but {args.output} was begun with it; restore it, or "
                "name another --output"
            )
    write_json(path, found | {name: x for name, x in known.items() if x is not None})


def recipe(args) -> list[str]:
    """The flags of what is trained in any layout, from --init-from or from OUTPUT/start."""
    seed = args.seed if args.seed is not None else int(args.init_from is not None)
    start = args.init_from or args.output / "start"
    return [*RECIPE, "--init-from", str(start), "--seed", str(seed)]


def write_start(args, data: Path) -> None:
    """OUTPUT/start: weights whose attention begins at the neighbouring tokens."""
    command = [sys.executable, "-m", "albert_lab.neighbours", *SIZE, *RECIPE, *schedule(20)]
    command += Layout(1, 1, "ds_configs/zero1_fp32_muon.json").flags
    command += ["--seed", str(args.seed or 0)]
    command += ["--data", str(data), "--output", str(args.output / "start")]
    run(command, args.output / "prepare.log")


def trainer(flags: Sequence[str], layout: Layout, data: Path, output: Path) -> list[str]:
    """The command that trains `recipe`'s flags in a layout, without --steps."""
    command = [*COMMAND, "train"]
    if layout.ranks > 1:
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
        command = [*launcher, "--num_gpus", str(layout.ranks), "--master_port", str(take_port())]
        command += ["--module", "albert_ds.train"]
    return [*command, *flags, *layout.flags, "--data", str(data), "--output", str(output)]


def measure(flags: Sequence[str], layout: Layout, data: Path, folder: Path) -> float:
    """Mean seconds of a step in a layout; infinite where the layout does not run."""
    name = f"{layout.ranks}x{layout.threads}-{Path(layout.ds_config).stem}-{layout.batch}"
    command = trainer(flags, layout, data, folder / name)
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
    found = [
        process
        for process, words in commands.items()
        if "--output" in words and any(word.startswith(begin) for word in words)
    ]
    if found:
        names = ", ".join(str(process.pid) for process in found)
        log_line(f"waiting for trials that a killed command has left running (processes {names})")
        psutil.wait_procs(found)


def fit_steps(hours: float, seconds: float) -> int:
    """The steps of so many seconds that the time is enough for."""
    return int(hours * 3600 * TRAINING_SHARE / seconds)


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
        found = {layout: measure(flags, layout, data, folder) for layout in layouts}
        best = min(found, key=lambda layout: found[layout])
        seconds = found[best]
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


def train(command: list[str], steps: int, run_folder: Path, layout: Layout) -> None:
    """Train to the end; one line a minute says how far it is and how long it will take."""
    log = run_folder.parent / "train.log"
    every = max(1, steps // 200)
    rhythm = ["--log-every", str(every), "--eval-every", str(5 * every), "--eval-samples", "1024"]
    words = [*command, *schedule(steps), *rhythm, "--save-every", str(10 * every)]
    to_log = {"stderr": subprocess.STDOUT}
    with log.open("a") as file, start(words, layout.threads, stdout=file, **to_log) as ran:
        while ran.poll() is None:
            try:
                ran.wait(60)
            except subprocess.TimeoutExpired:
                print(f"  {read_last_step(log)}", flush=True)
    check(ran.returncode, words, log)


def read_last_step(log: Path) -> str:
    """The trainer's newest line of a step, which ends with the time that is left."""
    lines = log.read_text(errors="replace").splitlines()
    steps = (line for line in reversed(lines) if line.startswith("step ") and " left " in line)
    return next(steps, "no step yet")


def fine_tune(args, checkpoint: Path, layout: Layout) -> list[list[str]]:
    """Rows of the small tasks: median and range of --seeds runs, pretrained and random."""
    rows = []
    for task, (folder, steps, batch) in TASKS.items():
        if not (args.tasks / folder).is_dir():
            log_line(f"--tasks {args.tasks}: no {folder} in it; that task is left out")
            continue
        row = [folder]
        for start, flags in (("pretrained", []), ("random", ["--from-scratch"])):
            output = args.output / "tasks" / start / task
            print(f"  {folder}, {start}", flush=True)
            command: list[object] = [*COMMAND, "finetune"]  # what is done it does not repeat
            command += ["--task", f"glue/{task}"]
            command += ["--data", args.tasks / folder, "--checkpoint", checkpoint]
            command += ["--output", output, "--steps", steps, "--batch-size", batch]
            command += ["--learning-rate", TUNING_RATE, "--seeds", args.seeds, *flags]
            config = f"ds_configs/zero1_{layout.precision}_adamw.json"  # TUNING_RATE's
            command += ["--deepspeed_config", PACKAGE / config]
            run(command, args.output / "tasks.log", len(os.sched_getaffinity(0)))
            metric, found = next(iter(read_json(output / "results.json")["dev"].items()))
            values = found["values"] if isinstance(found, dict) else [found]
            row.append(spread(values, ".3f"))
        rows.append([*row, metric])
    return rows


def write_report(args, layout: Layout, seconds: float, steps: int, tasks: list[list[str]]) -> None:
    """OUTPUT/report.md: what was done, on what, and what came of it."""
    out = args.output
    records = read_lines(out / "run" / "metrics.jsonl")
    tokens = sum(
        r["tokens_per_second"] * r["step_seconds"] * steps for r, steps in count_steps(records)
    )
    held = next(r for r in reversed(records) if "heldout_mlm_accuracy" in r)
    flags = [*recipe(args), *layout.flags, *schedule(steps)]
    parts = [
        "# What this model has learned",
        f"{args.hours:g} h were asked for; {steps:,} steps, {tokens / 1e6:.1f} million tokens, on "
        f"{name_device()} ({layout}; {seconds:.3f} s a step when measured).",
        f"    albert-ds train {shlex.join([*flags, '--data', str(out / 'data')])} --output RUN",
        "![curves](curves.svg) More of it: report.html.",
        "Held out, masked as in training, one word at a time: "
        f"{held['heldout_mlm_accuracy']:.1%} of {held['heldout_masked']:,} pieces. "
        "Below, up to three words together:",
        (out / "probe.md").read_text().strip(),
    ]
    if args.minimal_pairs:
        parts.append((out / "minimal_pairs.md").read_text().strip())
    if tasks:
        header = ["task", "pretrained", "random weights", "metric"]
        parts += [f"Median and range of {args.seeds} runs:", table(header, tasks)]
    write_file(out / "report.md", "\n\n".join(parts) + "\n")


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    refuse_within(args.output, args.text, "--text")
    find_files(args.text, "--text")
    if args.minimal_pairs is not None:
        from albert_ds.evals.minimal_pairs import read_pairs

        read_pairs(args.minimal_pairs)
        args.minimal_pairs = args.minimal_pairs.absolute()
    names = [name for name, *_ in TASKS.values()]
    if args.tasks is not None and not any((args.tasks / name).is_dir() for name in names):
        raise UserError(f"--tasks {args.tasks}: has none of the folders {', '.join(names)}")
    if args.init_from is not None:
        if args.vocab_size is not None:
            raise UserError("--vocab-size: not with --init-from, whose vocabulary is taken")
        args.init_from = Path(args.init_from).absolute()
        find_vocab(args.init_from)
    others = filter(None, (args.init_from, args.minimal_pairs, args.tasks))
    check_folder(args.output, [*args.text, *others], marks=["settings.json"])
    out = args.output = args.output.absolute()
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / ".lock")
    except BlockingIOError as error:
        raise UserError(f"--output {out}: in use by {error.strerror}") from None
    try:
        keep_settings(args)
        for number in STOPS:
            signal.signal(number, stop)
        learn(args)
    finally:
        lock.release()


def learn(args) -> None:
    """Make what is missing of OUTPUT, step by step."""
    out = args.output
    vocab, data, checkpoint = out / "vocab" / "spiece.model", out / "data", out / "run"
    text = ["--input", *map(_locate, args.text)]
    text += ["--text-field", args.text_field, "--language", args.language]
    log = out / "prepare.log"
    if args.init_from is not None:
        vocab = find_vocab(args.init_from)
    elif not vocab.is_file():
        pieces = args.vocab_size or PIECES
        print(f"== vocabulary of at most {pieces:,} pieces", flush=True)
        made = ["--output", out / "vocab", "--vocab-size", pieces]
        print(run([*COMMAND, "vocab", *text, *made], log), end="", flush=True)
    if not (data / "index.json").is_file():
        print(f"== shards of {LENGTH} tokens", flush=True)
        made = ["--output", data, "--sequence-length", LENGTH, "--holdout", "0.02"]
        print(run([*COMMAND, "shards", *text, "--vocab", vocab, *made], log), end="", flush=True)
    if args.init_from is None and not (out / "start" / "config.json").is_file():
        write_start(args, data)
    print("== speed of this machine", flush=True)
    flags = recipe(args)
    layout, seconds = choose_layout(flags, data, out, args.hours)
    steps = max(20, fit_steps(args.hours, seconds))
    print(f"== pretraining: {steps:,} steps of {seconds:.3f} s ({layout})", flush=True)
    train(trainer(flags, layout, data, checkpoint), steps, checkpoint, layout)
    print("== what it has learned", flush=True)
    measured = {"probe": ["--data", data]}
    if args.minimal_pairs:
        pairs = ["--minimal-pairs", args.minimal_pairs, "--precision", layout.precision]
        measured["minimal_pairs"] = pairs
    for name, how in measured.items():
        if not (out / f"{name}.md").is_file():
            command = [*COMMAND, "probe", "--checkpoint", checkpoint, *how]
            command = [*command, "--output", out / f"{name}.json"]
            write_file(out / f"{name}.md", run(command, log, len(os.sched_getaffinity(0))))
    curves = [*COMMAND, "plots", "curves", "--runs", checkpoint]
    run([*curves, "--output", out / "curves.svg"], log)
    run([*COMMAND, "report", checkpoint, "--output", out / "report.html"], log)
    tasks = fine_tune(args, checkpoint, layout) if args.tasks else []
    write_report(args, layout, seconds, steps, tasks)
    print((out / "report.md").read_text())
