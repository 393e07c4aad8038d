#!/usr/bin/env python
"""Does pretraining help? A checkpoint against random weights of its shape, task by task.

Both sides get the same steps. Each chooses its learning rate on a tenth of the training set (SST-2:
of its whole sentences), which is held out for that: the middle three of --rates are tried, and more
until the best has both its neighbours. Then --seeds runs with that rate on the whole training
set; the dev set is evaluated once in each, after the last step. Printed are their mean and standard
deviation, and Welch's test of the difference of the means. The same command continues a run that
was stopped.

python tools/lab/transfer.py --tasks FILES --checkpoint runs/small --output transfer
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from albert_lab.commands import learn
from albert_lab.tables import table

from albert_ds import cli
from albert_ds.cli import Number, Parser, positive
from albert_ds.errors import MachineFailed, UserError
from albert_ds.files import write_file
from albert_ds.json_files import read_json

ROOT = Path(__file__).parents[2]
STARTS = ("pretrained", "random")
RATES = ("1e-5", "3e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2")
HELD_OUT = 0.1  # of the training set


@dataclass(frozen=True, kw_only=True, slots=True)
class Small:
    """A task in a size that two CPU cores can take."""

    folder: str
    steps: int
    batch: int
    most_train: int = 1 << 30  # examples: rows, SQuAD's paragraphs, RACE's passages
    most_dev: int = 1 << 30
    flags: tuple[str, ...] = ()
    in_percent: bool = False  # its scores; those of the others are shares


TASKS = {
    **{
        f"glue/{name}": Small(folder=folder, steps=steps, batch=batch)
        for name, (folder, steps, batch) in learn.TASKS.items()
    },
    "glue/qnli": Small(folder="QNLI", steps=700, batch=16),
    "glue/mnli": Small(folder="MNLI", steps=1500, batch=16),
    "race": Small(
        folder="RACE",
        steps=400,
        batch=8,
        most_train=1500,
        most_dev=120,
        flags=("--sequence-length", "128", "--question-length", "40"),
    ),
    "squad1": Small(
        folder="squad1",
        steps=1000,
        batch=16,
        most_dev=150,
        flags=("--sequence-length", "128", "--stride", "64"),
        in_percent=True,
    ),
}


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/transfer.py", description=__doc__)
    add = parser.add_argument
    folders = ", ".join(task.folder for task in TASKS.values())
    text = f"folder with {folders}, files as published; a GLUE task without train.tsv has its dev "
    add("--tasks", type=Path, required=True, metavar="FOLDER", help=text + "set cut in two")
    text = "pretrained run or Hugging Face folder"
    add("--checkpoint", type=Path, required=True, metavar="RUN_OR_HF", help=text)
    add("--output", type=Path, required=True, metavar="DIR", help="folder of runs and results")
    add("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="tasks")
    seeds = Number(low=2, high=100, whole=True)
    add("--seeds", type=seeds, default=5, metavar="RUNS", help="runs of each side")
    rate = "learning rates to choose from, from the lowest to the highest"
    add("--rates", nargs="+", default=RATES, metavar="RATE", help=rate)
    text = "times the steps of each task"
    add("--steps-factor", type=Number(above=0), default=1.0, metavar="FACTOR", help=text)
    add("--threads", type=positive, default=1, metavar="THREADS", help="CPU threads of a run")
    config = ROOT / "ds_configs" / "zero1_fp32_adamw.json"
    text = "for DeepSpeed, of every run; zero1_bf16_adamw.json is faster on CPUs with matrix units "
    text += f"(default: {config.relative_to(ROOT)})"
    add("--deepspeed_config", type=Path, default=config, metavar="JSON", help=text)
    return parser


def divide(items: Sequence, count: int, seed: int = 0) -> tuple[list, list]:
    """All but `count` random items, and these; both in the given order."""
    kept = {*random.Random(seed).sample(range(len(items)), min(count, len(items)))}
    rest = [item for number, item in enumerate(items) if number not in kept]
    return rest, [item for number, item in enumerate(items) if number in kept]


def hold_out(name: str, rows: list) -> tuple[list, list]:
    """A task's training set without a tenth of it, and the tenth that the rate is chosen on.

    SST-2's has the phrases of its sentences too, as rows of their own: whole sentences are held
    out, as in the dev set, and what is a part of one of them is dropped from the training set.
    """
    if name != "glue/sst2":
        return divide(rows, int(HELD_OUT * len(rows)) or 1, seed=1)
    texts = [tuple(row.split("\t")[0].split()) for row in rows]
    inner = {phrase for text in texts for phrase in phrases(text) if phrase != text}
    whole = [number for number, text in enumerate(texts) if text not in inner]
    _, held_out = divide(whole, int(HELD_OUT * len(whole)) or 1, seed=1)
    seen = {phrase for number in held_out for phrase in phrases(texts[number])}
    rest = [row for row, text in zip(rows, texts, strict=True) if text not in seen]
    return rest, [rows[number] for number in held_out]


def phrases(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All runs of words in a sentence, the sentence too."""
    for begin in range(len(words)):
        for end in range(begin + 1, len(words) + 1):
            yield words[begin:end]


class Rows:
    """A GLUE task: lines of a table."""

    def __init__(self, folder: Path, has_header: bool):
        self._folder, self._has_header = folder, has_header

    def read(self) -> dict[str, list]:
        names = sorted(p.stem for p in self._folder.glob("*.tsv") if not p.stem.startswith("test"))
        found = {}
        for name in names:
            with (self._folder / f"{name}.tsv").open(encoding="utf-8", newline="\n") as file:
                found[name] = list(file)
        # MNLI's dev sets have more columns than its training set: a header for each number of tabs.
        tables = [lines for lines in found.values() if lines]
        self._heads = {lines[0].count("\t"): lines[: self._has_header] for lines in tables}
        found = {name: lines[self._has_header :] for name, lines in found.items()}
        if "train" not in found:
            found["train"], found["dev"] = divide(found["dev"], len(found["dev"]) // 2)
        return found

    def write(self, folder: Path, splits: dict[str, list]) -> None:
        folder.mkdir(parents=True)
        for name, lines in splits.items():
            head = self._heads[lines[0].count("\t")] if lines else []
            write_file(folder / f"{name}.tsv", "".join([*head, *lines]))


class Paragraphs:
    """SQuAD 1.1: paragraphs, each an article of its own."""

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self) -> dict[str, list]:
        found = {}
        for name in ("train", "dev"):
            content = json.loads((self._folder / f"{name}-v1.1.json").read_text("utf-8"))
            found[name] = [
                {"title": article.get("title", ""), "paragraphs": [paragraph]}
                for article in content["data"]
                for paragraph in article["paragraphs"]
            ]
        return found

    def write(self, folder: Path, splits: dict[str, list]) -> None:
        folder.mkdir(parents=True)
        for name, articles in splits.items():
            content = {"version": "1.1", "data": articles}
            write_file(folder / f"{name}-v1.1.json", json.dumps(content))


class Passages:
    """RACE's middle schools: a file a passage."""

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self) -> dict[str, list]:
        return {
            name: sorted((self._folder / name / "middle").glob("*.txt"))
            for name in ("train", "dev")
        }

    def write(self, folder: Path, splits: dict[str, list]) -> None:
        for name, paths in splits.items():
            (folder / name / "middle").mkdir(parents=True)
            for path in paths:
                shutil.copyfile(path, folder / name / "middle" / path.name)


def open_task(name: str, folder: Path) -> Rows | Paragraphs | Passages:
    if name == "race":
        return Passages(folder)
    if name == "squad1":
        return Paragraphs(folder)
    from albert_ds.tasks.glue import GLUE

    return Rows(folder, has_header=not GLUE[name.removeprefix("glue/")].headless)


def prepare(name: str, source: Path, target: Path) -> None:
    """Write target/final, and target/choose, whose dev set is a part of the training set."""
    if target.exists():
        return
    small, data = TASKS[name], open_task(name, source)
    try:
        splits = data.read()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{source}: not as published: {error}") from None
    if not all(splits.values()):
        raise UserError(f"{source}: a split is empty; must have a training and a dev set")
    limits = dict.fromkeys(splits, small.most_dev) | {"train": small.most_train}
    splits = {split: divide(items, limits[split])[1] for split, items in splits.items()}
    rest, held_out = hold_out(name, splits["train"])
    dev = [split for split in splits if split != "train"]
    beside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    data.write(beside / "final", splits)
    data.write(beside / "choose", {"train": rest, **dict.fromkeys(dev, held_out)})
    beside.rename(target)
    print(f"{name}: " + ", ".join(f"{len(found):,} {split}" for split, found in splits.items()))
    print(f"  its rate is chosen on {len(held_out):,} of train, after training on {len(rest):,}")


class Tuner:
    """Runs finetune.py on one task."""

    def __init__(self, args, name: str):
        self._args, self._name, self._small = args, name, TASKS[name]

    def __call__(self, start: str, which: str, rate: str, seeds: int) -> list[float]:
        """The dev metric of each seed."""
        args, small = self._args, self._small
        output = args.output / start / self._name.replace("/", "-") / f"{which}-{rate}"
        steps = max(1, round(small.steps * args.steps_factor))
        command = [sys.executable, "-W", "ignore", str(ROOT / "albert_ds" / "finetune.py")]
        command += ["--task", self._name, "--checkpoint", str(args.checkpoint)]
        command += ["--data", str(args.output / "data" / small.folder / which)]
        command += ["--output", str(output), "--cache", str(args.output / "features")]
        command += ["--steps", str(steps), "--batch-size", str(small.batch), "--dropout", "0"]
        command += ["--learning-rate", rate, "--seeds", str(seeds), "--eval-every", str(steps)]
        command += ["--save-every", str(steps), "--log-every", str(max(1, steps // 5))]
        command += ["--deepspeed_config", str(args.deepspeed_config)]
        command += [*small.flags, *(["--from-scratch"] if start == "random" else [])]
        results = output / "results.json"
        if not results.is_file():
            self._run(command)
        found = read_json(results)
        score = found["dev"][found["metric"]]
        return score["values"] if isinstance(score, dict) else [score]

    def _run(self, command: list[str]) -> None:
        log = self._args.output / "log.txt"
        environ = {**os.environ, "OMP_NUM_THREADS": str(self._args.threads)}
        environ |= {"PYTHONPATH": str(ROOT)}
        with log.open("a") as file:
            code = subprocess.run(command, env=environ, stdout=file, stderr=file).returncode
        if code:
            last = "".join(log.read_text(errors="replace").strip().splitlines()[-1:])
            raise MachineFailed(f"finetune.py ended with {code}; see {log}: {last}")


def choose_rate(rates: Sequence[str], score: Callable[[str], float]) -> dict[str, float]:
    """Scores of the middle three rates, and of more until the best has both its neighbours."""
    first = max(0, len(rates) // 2 - 1)
    tried = {rate: score(rate) for rate in rates[first : first + 3]}
    while True:
        best = rates.index(find_best(tried))
        missing = [rate for rate in rates[max(0, best - 1) : best + 2] if rate not in tried]
        if not missing:
            return tried
        tried |= {rate: score(rate) for rate in missing}


def find_best(tried: dict[str, float]) -> str:
    """The rate with the best score, of equal ones the first that was tried."""
    return max(tried, key=lambda rate: tried[rate])


def measure(tune: Callable, rates: Sequence[str], seeds: int) -> dict[str, dict]:
    """For each start: the score of each rate, the rate taken, and the scores of its seeds."""
    found = {}
    for start in STARTS:
        tried = choose_rate(rates, lambda rate, at=start: tune(at, "choose", rate, 1)[0])
        best = find_best(tried)
        found[start] = {"tried": tried, "rate": best, "dev": tune(start, "final", best, seeds)}
    return found


def probability(one: Sequence[float], other: Sequence[float]) -> float:
    """Welch's test: how probable so large a difference is if the means are equal."""
    if len({*one, *other}) == 1:
        return 1.0
    if len({*one}) == len({*other}) == 1:  # no spread at all
        return 0.0
    from scipy.stats import ttest_ind

    return float(ttest_ind(one, other, equal_var=False).pvalue)


def as_row(name: str, found: dict[str, dict]) -> list[str]:
    scale = 1 if TASKS[name].in_percent else 100
    one, other = ([scale * score for score in found[start]["dev"]] for start in STARTS)
    cells = [f"{statistics.mean(x):.1f} +- {statistics.stdev(x):.1f}" for x in (one, other)]
    difference = statistics.mean(one) - statistics.mean(other)
    rates = " / ".join(found[start]["rate"] for start in STARTS)
    return [name, *cells, f"{difference:+.1f}", f"{probability(one, other):.2g}", rates]


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    args.checkpoint, args.output = args.checkpoint.absolute(), args.output.absolute()
    for name in args.only:
        source = args.tasks / TASKS[name].folder
        if not source.is_dir():
            raise UserError(f"--tasks {args.tasks}: no {source.name} in it; --only takes some")
        prepare(name, source, args.output / "data" / source.name)
    results = {}
    for name in args.only:
        results[name] = measure(Tuner(args, name), args.rates, args.seeds)
        write_file(args.output / "transfer.json", json.dumps(results, indent=1) + "\n")
        print(" | ".join(as_row(name, results[name])), flush=True)
    header = ["", *STARTS, "difference", "p", "rates"]
    print(table(header, [as_row(name, found) for name, found in results.items()]))


if __name__ == "__main__":
    cli.run(main)
