"""Run trainers on the fake device, one after the other: `python -m tests.fake_cuda.run RUNS`.

RUNS is JSON, a list of [REPORT, MODULE, [FLAG, ...]]; each is one run of the module's `main` on
this rank, in a fork of this process, so that the libraries are imported once. It stops at the first
code above 0 and ends with it. Rank 0 writes each REPORT, JSON:
    mixed   operators that were given tensors of both devices, and where
    steps   for each optimizer step, what made the host wait, and how often: {"WHAT at WHERE": N}
"""

import importlib
import json
import os
import sys
import traceback
from collections import Counter

from tests import preload, staged_gloo  # noqa: F401 (preload: what every run imports)
from tests.fake_cuda import torch_cuda

ROOTS = ("albert_ds/", "site-packages/deepspeed/", "site-packages/megatron/")
# The module of a trainer's loop, and its functions that are one step.
STEP = {
    "albert_ds.train": ("albert_ds.training.pretrain", "run_passes", "update"),
    "albert_ds.finetune": ("albert_ds.training.finetune", "train_step"),
}


class Report:
    def __init__(self):
        self.mixed = Counter()
        self.steps = []
        self.now = None

    def hear(self, name: str, kind: str) -> None:
        if kind == "mixed":
            self.mixed[f"{name} at {find_place()}"] += 1
        elif self.now is not None and not staged_gloo.copying:
            self.now[f"{name} at {find_place()}"] += 1

    def watch(self, trainer, *parts: str) -> None:
        """Count events from the begin of the first of these functions to the end of the last."""

        def watched(part, function):
            def call(*given):
                if part == parts[0]:
                    self.now = Counter()
                outcome = function(*given)
                if part == parts[-1]:
                    self.steps.append(self.now)
                    self.now = None
                return outcome

            return call

        for part in parts:
            setattr(trainer, part, watched(part, getattr(trainer, part)))


def find_place() -> str:
    """The innermost lines of the product or of a library that it calls."""
    for frame in reversed(traceback.extract_stack()):
        for root in ROOTS:
            if root in frame.filename:
                return f"{root}{frame.filename.rpartition(root)[2]}:{frame.name}"
    return "?"


def run(path: str, program: str, argv: list[str]) -> int:
    report = Report()
    torch_cuda.listen(report.hear)
    trainer = importlib.import_module(program)
    if program in STEP:
        loop, *parts = STEP[program]
        report.watch(importlib.import_module(loop), *parts)
    code = trainer.main(argv) or 0
    torch_cuda.listen(None)
    if os.environ.get("RANK", "0") == "0":
        with open(path, "w") as file:
            json.dump({"mixed": report.mixed, "steps": report.steps}, file, indent=1)
    return code


def main(path: str) -> int:
    with open(path) as file:
        runs = json.load(file)
    for port, *given in runs:
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = str(port)
            code = 1
            try:
                code = run(*given)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            print(f"{given} ended with {code}", file=sys.stderr)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
