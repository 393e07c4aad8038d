#!/usr/bin/env python
"""Interrupt a training run on this machine's devices, and see what becomes of it.

`resume`: one rank is told to stop (USR1), continues, is killed, continues; its weights and moments
must be those of an undisturbed run, bit for bit. `lost`: one of two ranks is killed or frozen; the
other must end with code 5 and name it. Run as `python -m tools.lab.fault_check`.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path

from albert_ds.base import cli
from albert_ds.base.cli import Parser, non_negative
from albert_ds.base.errors import MachineFailed, Stopped
from albert_ds.base.files import write_report
from tools.lab.chaos import Trainer, compare

TINY = ("--model", "albert-tiny", "--num-layers", "2", "--hidden-size", "32", "--num-heads", "2")
LOST_SECONDS = 60  # after a rank is killed or frozen, the other has ended


def build_parser() -> Parser:
    parser = Parser(prog="tools/lab/fault_check.py", description=__doc__)
    add = parser.add
    add("what", "the fault", choices=("resume", "lost"))
    add("--data", "folder made by build_shards.py", type=cli.path, required=True)
    add("--folder", "folder for the runs; an old one is removed", type=Path, required=True)
    add("--steps", "optimizer steps of `resume` (default: 200, --quick 12)", "STEPS", non_negative)
    add("--signal", "what a lost rank is sent", choices=("KILL", "STOP"), default="KILL")
    add("--quick", "a model of two layers, 32 wide", action="store_true")
    add("--output", "JSON with one sentence about the outcome", type=cli.new_file)
    return parser


def command(args, steps: int) -> list[str]:
    """albert-base on rows of 128 tokens in bf16; or a very small model."""
    is_small = args.quick or args.what == "lost"
    shape = TINY if is_small else ("--model", "albert-base")
    file = "ds_configs/zero1_bf16.json"
    return [
        *(sys.executable, "albert_ds/train.py", *shape, "--data", args.data),
        *("--deepspeed_config", file, "--deterministic", "--steps", str(steps)),
        *("--sequence-length", "64" if is_small else "128", "--batch-size", "32"),
        *("--micro-batch-size", "16", "--log-every", "1", "--eval-every", "1000000"),
        *("--save-every", str(max(2, steps // 8)), "--timeout-minutes", "0.5"),
    ]


def wait_for_step(trainer: Trainer, step: int) -> None:
    while trainer.step() < step:
        if not trainer.is_running():
            raise MachineFailed(trainer.describe_end())
        time.sleep(0.01)


def expect(trainer: Trainer, codes: list[int]) -> None:
    if trainer.finish() != codes:
        raise MachineFailed(f"expected {codes}; {trainer.describe_end()}")


def resume(args) -> str:
    steps = args.steps or (12 if args.quick else 200)
    argv = command(args, steps)
    alone = Trainer(argv, args.folder / "alone", 1)
    alone.start()
    expect(alone, [0])
    disturbed = Trainer(argv, args.folder / "disturbed", 1)
    at = []
    for word, share, code in (("SIGUSR1", 0.3, Stopped.code), ("SIGKILL", 0.7, -signal.SIGKILL)):
        disturbed.start()
        wait_for_step(disturbed, int(share * steps))
        disturbed.send(0, signal.Signals[word])
        expect(disturbed, [code])
        at.append(f"{word} at step {disturbed.step()}")
    disturbed.start()
    expect(disturbed, [0])
    if differing := compare(alone.output, disturbed.output):
        raise MachineFailed(f"after {' and '.join(at)} these differ: {', '.join(differing)}")
    return f"{steps} steps, {' and '.join(at)}: equal bit for bit"


def lose(args) -> str:
    run = Trainer(command(args, 10**6), args.folder / "lost", 2)
    run.start()
    wait_for_step(run, 3)
    run.send(1, signal.Signals[f"SIG{args.signal}"])
    started = time.monotonic()
    while run.is_running_at(0) and time.monotonic() - started < LOST_SECONDS:
        time.sleep(0.1)
    seconds = time.monotonic() - started
    ended_in_time = not run.is_running_at(0)
    run.kill([0, 1])
    codes = run.finish()
    if not ended_in_time or codes[0] != MachineFailed.code:
        raise MachineFailed(f"after {seconds:.0f} s the other rank: {run.describe_end()}")
    reason = json.loads((run.output / "exit.json").read_text())["reason"]
    if "rank 1" not in reason:
        raise MachineFailed(f"exit.json does not name the lost rank: {reason}")
    return f"the other ended after {seconds:.0f} s: {reason}"


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    shutil.rmtree(args.folder, ignore_errors=True)
    says = {"resume": resume, "lost": lose}[args.what](args)
    print(says)
    if args.output:
        write_report(args.output, {"says": says})


if __name__ == "__main__":
    cli.run(main)
