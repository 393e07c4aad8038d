#!/usr/bin/env python
"""Kill a training run many times, and compare its weights with those of an undisturbed run.

Every kill is a SIGKILL, to one random rank or to all, at a random moment: while the ranks start,
in a step, or while a checkpoint is written. Ranks that are not killed must end by themselves. Then
the same command runs again, as a scheduler would start it. After the last kill the run finishes.
Flags that this command does not know are passed on to train.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from albert_lab.ranks import find_port, rank_environment

from albert_ds import cli
from albert_ds.cli import Parser, positive
from albert_ds.errors import MachineFailed, UserError
from albert_ds.json_files import parse_json

ROOT = Path(__file__).parents[2]
MOMENTS = ("starting", "stepping", "stepping", "saving", "saving")
SMALL = (  # a run in which a step, and a save, take milliseconds
    *("--model", "albert-tiny", "--num-layers", "2", "--hidden-size", "32"),
    *("--embedding-size", "16", "--batch-size", "16", "--micro-batch-size", "2"),
    *("--deepspeed_config", "ds_configs/zero1_fp32.json", "--save-every", "3"),
    *("--log-every", "1", "--eval-every", "1000000", "--timeout-minutes", "0.5"),
)


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
        self._ranks: list[subprocess.Popen] = []
        self._stderr: list[str] = []

    def start(self) -> None:
        environ = {"OMP_NUM_THREADS": "1", **os.environ, **find_port()}
        self._ranks = [
            subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=environ | rank_environment(rank, self._size, rank),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(self._size)
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
        if self._ranks[0].stderr and not self._ranks[0].stderr.closed:
            self._stderr = [process.communicate(timeout=900)[1] for process in self._ranks]
        return [process.returncode for process in self._ranks]

    def describe_end(self) -> str:
        return (
            f"{self.output}: ended with {self.finish()}: {[text[-1000:] for text in self._stderr]}"
        )


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/chaos.py", description=__doc__)
    add = parser.add
    add("--data", "folder made by build_shards.py", required=True)
    add("--output", "folder for both runs; must not exist yet", type=Path, required=True)
    add("--kills", "number of SIGKILLs", "KILLS", positive, default=50)
    add("--ranks", "processes of a run", "RANKS", positive, default=2)
    add("--steps", "optimizer steps of a run (default: 6 for each kill)", "STEPS", positive)
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
    """Files of the newest checkpoints that are not equal bit for bit."""
    name = (one / "checkpoints" / "latest").read_text().strip()
    if name != (other / "checkpoints" / "latest").read_text().strip():
        return ["latest"]
    folders = [run / "checkpoints" / name for run in (one, other)]
    files = sorted({path.name for folder in folders for path in folder.iterdir()})
    return [f for f in files if (folders[0] / f).read_bytes() != (folders[1] / f).read_bytes()]


def run_to_the_end(trainer: Trainer) -> None:
    trainer.start()
    if set(trainer.finish()) != {0}:
        raise MachineFailed(trainer.describe_end())


def main(argv: list[str]) -> int:
    args, passed_on = build_parser().parse_known_args(argv)
    if args.output.exists():
        raise UserError(f"--output {args.output}: exists already")
    steps = args.steps or 6 * args.kills
    kills = plan_kills(args.kills, steps, args.ranks, args.seed)
    command = [sys.executable, "albert_ds/train.py", *SMALL, "--data", args.data]
    command += ["--steps", str(steps), *passed_on]
    alone = Trainer(command, args.output / "alone", args.ranks)
    run_to_the_end(alone)
    killed = Trainer(command, args.output / "killed", args.ranks)
    for number, kill in enumerate(kills, start=1):
        while (step := start_and_kill(killed, kill)) is None:
            print("ended by itself with exit code 5: starting again", flush=True)
        victims = "all ranks" if len(kill.victims) == args.ranks else f"rank {kill.victims[0]}"
        print(f"kill {number}: {victims} while {kill.moment}, step {step}", flush=True)
    run_to_the_end(killed)
    moments = Counter(kill.moment for kill in kills)
    differing = compare(alone.output, killed.output)
    print(
        f"{args.kills} kills of {args.ranks} ranks over {steps} steps ("
        + ", ".join(f"{count} while {moment}" for moment, count in sorted(moments.items()))
        + "): the final weights and moments "
        + (f"DIFFER in {', '.join(differing)}" if differing else "are equal bit for bit")
    )
    return 1 if differing else 0


if __name__ == "__main__":
    cli.run(main)
