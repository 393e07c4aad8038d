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
from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.cli import log_line
from albert_ds.base.errors import UserError
from albert_ds.base.files import PACKAGE, check_folder, write_file, write_json
from albert_ds.base.json_files import read_json, read_lines
from albert_ds.base.locks import FileLock
from albert_ds.base.storage import find_files, is_url, refuse_within, stat
from albert_ds.data.stream_config import StreamConfig
from albert_ds.process.world import name_device
from albert_ds.settings.finetune import FinetuneConfig
from albert_lab.ranks import take_port
from albert_lab.small_recipe import (
    COMMAND,
    HOURS,
    LENGTH,
    PIECES,
    STOPS,
    Layout,
    check,
    choose_holdout,
    choose_layout,
    fit_steps,
    recipe,
    rhythm,
    run,
    schedule,
    shards_command,
    start,
    start_command,
    stop,
    text_flags,
    trainer,
    vocab_command,
)
from albert_lab.tables import count_steps, spread, table

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


def build_parser() -> cli.Parser:
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add
    text = "files, folders or URLs of text, as `albert-ds vocab --input` takes them"
    add("--text", text, "FILE", cli.path, nargs="+", required=True)
    text = "the field of JSON lines or the column of a table that holds the text"
    add("--text-field", text, "NAME", default="text")
    add("--output", "folder for all that it makes", "DIR", Path, required=True)
    add("--hours", "time of the pretraining", "HOURS", HOURS, default=2.0)
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


def find_vocab(initial: Path) -> Path:
    """The vocabulary of --init-from; UserError unless the recipe can begin with its weights."""
    from albert_ds.checkpoint.initial import find_origins
    from albert_ds.checkpoint.model_folder import ModelFolder

    folder = ModelFolder(initial)
    vocab = folder.root / "spiece.model"
    config = folder.config
    if not vocab.is_file():
        raise UserError(f"--init-from {initial}: no {vocab.name} in it")
    find_origins(folder, config)
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
    settings = {name: getattr(args, name) for name in names}
    for name in ("init_from", "minimal_pairs"):
        settings[name] = (folder := getattr(args, name)) and str(folder)
    settings["text"] = [[_locate(name), *stat(name)] for name in find_files(args.text)]
    is_begun = any((args.output / name).exists() for name in ("vocab", "data"))
    known = read_json(path) if is_begun else {}
    for name, before in known.items():
        is_later = name == "minimal_pairs" and None in (before, settings[name])
        if settings[name] != before and not is_later:
            what = "the text has changed" if name == "text" else f"was {before}"
            raise UserError(
                f"{cli.as_flag(name)}: {what}, but {args.output} was begun with it; restore it, or "
                "name another --output"
            )
    write_json(path, settings | {name: x for name, x in known.items() if x is not None})


def flags_of(args) -> list[str]:
    """Those of what is trained in any layout, from --init-from or from OUTPUT/start."""
    seed = args.seed if args.seed is not None else int(args.init_from is not None)
    return recipe(args.init_from or args.output / "start", seed)


def train(command: list[str], steps: int, run_folder: Path, layout: Layout) -> None:
    """Train to the end; one line a minute says how far it is and how long it will take."""
    log = run_folder.parent / "train.log"
    words = [*command, *schedule(steps), *rhythm(steps)]
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
        for weights, flags in (("pretrained", []), ("random", ["--from-scratch"])):
            output = args.output / "tasks" / weights / task
            print(f"  {folder}, {weights}", flush=True)
            command: list[object] = [*COMMAND, "finetune"]  # what is done it does not repeat
            command += ["--task", f"glue/{task}"]
            command += ["--data", args.tasks / folder, "--checkpoint", checkpoint]
            command += ["--output", output, "--steps", steps, "--batch-size", batch]
            command += ["--learning-rate", TUNING_RATE, "--seeds", args.seeds, *flags]
            config = f"ds_configs/zero1_{layout.precision}_adamw.json"  # TUNING_RATE's
            command += ["--deepspeed_config", PACKAGE / config]
            run(command, args.output / "tasks.log", len(os.sched_getaffinity(0)))
            metric, score = next(iter(read_json(output / "results.json")["dev"].items()))
            values = score["values"] if isinstance(score, dict) else [score]
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
    flags = [*flags_of(args), *layout.flags, *schedule(steps)]
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
    vocab = out / "vocab" / "spiece.model"
    data = out / "data"
    checkpoint = out / "run"
    text = text_flags([*map(_locate, args.text)], args.text_field, args.language)
    log = out / "prepare.log"
    if args.init_from is not None:
        vocab = find_vocab(args.init_from)
    elif not vocab.is_file():
        pieces = args.vocab_size or PIECES
        print(f"== vocabulary of at most {pieces:,} pieces", flush=True)
        print(run(vocab_command(text, out / "vocab", pieces), log), end="", flush=True)
    if not (data / "index.json").is_file():
        holdout = choose_holdout(sum(stat(name).size for name in find_files(args.text)))
        print(f"== shards of {LENGTH} tokens, {holdout:.0%} of the documents held out", flush=True)
        words = shards_command(text, vocab, data, holdout=holdout)
        print(run(words, log), end="", flush=True)
    if args.init_from is None and not (out / "start" / "config.json").is_file():
        run(start_command(data, out / "start", args.seed or 0), log)
    print("== speed of this machine", flush=True)
    flags = flags_of(args)
    layout, seconds = choose_layout(flags, data, out, args.hours)
    steps = fit_steps(args.hours, seconds)
    print(f"== pretraining: {steps:,} steps of {seconds:.3f} s ({layout})", flush=True)
    train(trainer(flags, layout, data, checkpoint, take_port()), steps, checkpoint, layout)
    print("== what it has learned", flush=True)
    measured = {"probe": ["--data", data]}
    if args.minimal_pairs:
        pairs = ["--minimal-pairs", args.minimal_pairs, "--precision", layout.precision]
        measured["minimal_pairs"] = pairs
    for name, options in measured.items():
        if not (out / f"{name}.md").is_file():
            command = [*COMMAND, "probe", "--checkpoint", checkpoint, *options]
            command = [*command, "--output", out / f"{name}.json"]
            write_file(out / f"{name}.md", run(command, log, len(os.sched_getaffinity(0))))
    curves = [*COMMAND, "plots", "curves", "--runs", checkpoint]
    run([*curves, "--output", out / "curves.svg"], log)
    run([*COMMAND, "report", checkpoint, "--output", out / "report.html"], log)
    tasks = fine_tune(args, checkpoint, layout) if args.tasks else []
    write_report(args, layout, seconds, steps, tasks)
    print((out / "report.md").read_text())
