#!/usr/bin/env python
"""Kill a training run many times, and compare its weights with those of an undisturbed run.

Every kill is a SIGKILL, to one random rank or to all, at a random moment: while the ranks start,
in a step, or while a checkpoint is written. Ranks that are not killed must end by themselves. Then
the same command runs again, as a scheduler would start it. After the last kill the run finishes.
Each of the cases below has its share of the kills: together they use every feature that changes
what a step computes. Flags that this command does not know are passed on to train.py.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from albert_lab.ranks import find_port, rank_environment

from albert_ds.base import cli
from albert_ds.base.cli import Parser, positive
from albert_ds.base.errors import MachineFailed, UserError
from albert_ds.base.json_files import parse_json

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for the server of the tests that forks ranks
from tests.distributed import Program  # noqa: E402

MOMENTS = ("starting", "stepping", "stepping", "saving", "saving")
SMALL = (  # a run in which a step, and a save, take milliseconds
    *("--model", "albert-tiny", "--hidden-size", "32", "--embedding-size", "16"),
    *("--micro-batch-size", "2", "--save-every", "2", "--log-every", "1"),
    *("--eval-every", "1000000", "--timeout-minutes", "2", "--num-workers", "1"),
    *("--batch-size", "4@0,8@35%", "--sequence-length", "32@0,64@50%"),
    *("--masked-fraction", "0.3..0.15@100%", "--average", "0.99"),
    *("--keep-last", "1000000"),
)
ADDITIONS = ("--num-layers", "4", "--per-layer", "norm,scale,position,lora:2")
LOOP = ("--sharing", "loop:1,1x2,1", "--per-layer", "inject,scale", "--exit-losses", "2:0.5")
CASES = {  # the DeepSpeed JSON, and what is added to SMALL
    "additions": ("zero1_fp32", *ADDITIONS, "--depth-schedule", "2@0,4@40%"),
    "tensor parallel": (
        *("zero1_fp32", *ADDITIONS, "--depth-schedule", "2@0,4@40%"),
        *("--tensor-parallel", "2", "--learning-rate-schedule", "wsd"),
    ),
    "loop, Muon": ("zero1_bf16_muon", *LOOP, "--learning-rate-schedule", "cosine"),
    "drawn depth, AdamW": (
        *("zero1_fp32_adamw", "--num-layers", "4", "--depth-schedule", "2-4@0"),
        *("--activation-checkpointing", "block"),
    ),
    "ZeRO-3": ("zero3_bf16", "--num-layers", "4", "--sharing", "cycle:2", "--objective", "nsp"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """When and how one start of the run is killed."""

    step: int  # not before this step has finished
    moment: str  # starting | stepping | saving
    victims: list[int]
    delay: float  # 0 to 1, scaled by the moment


class Trainer:
    """One RUN, started several times."""

    def __init__(self, command: list[str], output: Path, ranks: int):
        self.output, self._size = output, ranks
        self._command = [*command, "--output", str(output)]
        self._ranks: list[Program] = []

    def start(self) -> None:
        environ = {"OMP_NUM_THREADS": "1", **os.environ, **find_port()}
        self._ranks = [
            Program(self._command[1:], cwd=ROOT, env=environ | rank_environment(r, self._size, r))
            for r in range(self._size)
        ]

    def is_running(self) -> bool:
        return all(process.poll() is None for process in self._ranks)

    def step(self) -> int:
        """The last finished step that was logged."""
        path = self.output / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [line for line in lines[-2:] if line.endswith("}")]
        return parse_json(whole[-1].encode(), str(path))["step"] if whole else 0

    def is_saving(self) -> bool:
        return any(self.output.glob("checkpoints/.step-*.tmp"))

    def is_running_at(self, rank: int) -> bool:
        return self._ranks[rank].poll() is None

    def send(self, rank: int, number: int) -> None:
        self._ranks[rank].send_signal(number)

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.send(rank, signal.SIGKILL)

    def finish(self) -> list[int]:
        """Wait until all ranks have ended; their exit codes."""
        return [process.wait(timeout=900) for process in self._ranks]

    def describe_end(self) -> str:
        said = [process.communicate()[1][-1000:] for process in self._ranks]
        return f"{self.output}: ended with {self.finish()}: {said}"


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/chaos.py", description=__doc__)
    add = parser.add
    add("--data", "folders made by `albert-ds shards`", required=True, nargs="+")
    add("--output", "folder for the runs; must not exist yet", type=Path, required=True)
    add("--kills", "number of SIGKILLs", "KILLS", positive, default=50)
    add("--cases", "what runs", nargs="+", choices=CASES, default=list(CASES))
    add("--ranks", "processes of a run", "RANKS", positive, default=2)
    add("--steps", "optimizer steps of a run (default: 6 for each of its kills)", "STEPS", positive)
    add("--seed", "seed of the kills' random moments", "N", positive, default=1)
    return parser


def plan_kills(kills: int, steps: int, ranks: int, seed: int) -> list[Kill]:
    """Kills at random steps in rising order, so that the run makes progress between them."""
    rng = random.Random(seed)
    last = steps - 6  # a checkpoint follows the last kill
    if last < kills:
        raise UserError(
            f"--steps {steps}: too few for --kills {kills}; allowed: at least {kills + 6}"
        )
    return [
        Kill(
            step=step,
            moment=rng.choice(MOMENTS),
            victims=rng.choice([[rng.randrange(ranks)], list(range(ranks))]),
            delay=rng.random(),
        )
        for step in sorted(rng.sample(range(1, last + 1), kills))
    ]


def start_and_kill(trainer: Trainer, kill: Kill) -> int | None:
    """Start the run and kill it as `kill` says; returns the step at which that happened.

    None if the ranks ended by themselves before, for example because one started too late.
    """
    trainer.start()
    if kill.moment == "starting":
        # Imports, rendezvous and reading the checkpoint take seconds; on a fast machine fewer.
        deadline = time.monotonic() + 10 * kill.delay
        wait_while(trainer, lambda: time.monotonic() < deadline and trainer.step() < kill.step)
    else:
        wait_while(trainer, lambda: trainer.step() < kill.step)
        if kill.moment == "saving":
            wait_while(trainer, lambda: not trainer.is_saving())
        time.sleep(kill.delay / 100)
    step = trainer.step() if trainer.is_running() else None
    if step is not None:
        trainer.kill(kill.victims)
    allowed = {MachineFailed.code} | ({-signal.SIGKILL} if step is not None else set())
    if not set(trainer.finish()) <= allowed:
        raise MachineFailed(trainer.describe_end())
    return step


def wait_while(trainer: Trainer, condition) -> None:
    while trainer.is_running() and condition():
        time.sleep(0.001)


def compare(one: Path, other: Path) -> list[str]:
    """Files of the newest checkpoint of `other` that are not those of `one`, bit for bit."""
    name = (other / "checkpoints" / "latest").read_text().strip()
    folders = [run / "checkpoints" / name for run in (one, other)]
    files = sorted({path.name for folder in folders for path in folder.glob("*")})
    missing = [name] * (not folders[0].is_dir())
    return missing or [
        f for f in files if (folders[0] / f).read_bytes() != (folders[1] / f).read_bytes()
    ]


def run_to_the_end(trainer: Trainer) -> None:
    trainer.start()
    if set(trainer.finish()) != {0}:
        raise MachineFailed(trainer.describe_end())


def kill_one_case(args, case: str, kills: list[Kill], steps: int, passed_on: list[str]) -> bool:
    """Whether the run that is killed has the checkpoints of one that is not."""
    folder = args.output / case.replace(",", "").replace(" ", "_")
    folder.mkdir(parents=True)
    config, *flags = CASES[case]
    command = [sys.executable, "albert_ds/train.py", *SMALL, *flags, "--steps", str(steps)]
    command += ["--deepspeed_config", f"ds_configs/{config}.json", "--data", *args.data]
    command += passed_on
    alone, killed = (Trainer(command, folder / name, args.ranks) for name in ("alone", "killed"))
    run_to_the_end(alone)
    differing: list[str] = []
    for number, kill in enumerate(kills, start=1):
        while (step := start_and_kill(killed, kill)) is None:
            print("ended by itself with exit code 5: starting again", flush=True)
        victims = "all ranks" if len(kill.victims) == args.ranks else f"rank {kill.victims[0]}"
        has_saved = (killed.output / "checkpoints" / "latest").is_file()
        differing += compare(alone.output, killed.output) if has_saved else []
        verdict = "DIFFERS" if differing else "equal" if has_saved else "nothing saved yet"
        print(
            f"{case}, kill {number}: {victims} while {kill.moment}, step {step}: {verdict}",
            flush=True,
        )
    run_to_the_end(killed)
    differing += compare(alone.output, killed.output)
    verdict = f"DIFFER in {', '.join(differing)}" if differing else "are equal bit for bit"
    print(
        f"{case}: {len(kills)} kills of {args.ranks} ranks over {steps} steps: "
        f"the final weights and moments {verdict}",
        flush=True,
    )
    return not differing


def main(argv: list[str]) -> int:
    args, passed_on = build_parser().parse_known_args(argv)
    if args.output.exists():
        raise UserError(f"--output {args.output}: exists already")
    moments = Counter()
    equal = 0
    for number, case in enumerate(args.cases):
        count = len(range(number, args.kills, len(args.cases)))
        steps = args.steps or 6 * (count + 1)
        kills = plan_kills(count, steps, args.ranks, args.seed + number)
        equal += count * kill_one_case(args, case, kills, steps, passed_on)
        moments += Counter(kill.moment for kill in kills)
    words = ", ".join(f"{count} while {moment}" for moment, count in sorted(moments.items()))
    print(f"{args.kills} kills in {len(args.cases)} cases ({words}): {equal} ended bit for bit")
    return int(equal < args.kills)


if __name__ == "__main__":
    cli.run(main)
