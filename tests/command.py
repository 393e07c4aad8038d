"""A user's command, run to its end in this process."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from albert_ds import __main__ as albert_ds
from albert_ds.base import cli

ROOT = Path(__file__).parents[1]


class Done(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def run_command(*words) -> Done:
    """`albert-ds WORDS`. A traceback is the test's own."""
    return run_main(albert_ds.main, *words)


def write_scripts(folder: Path, **bodies: str) -> dict[str, str]:
    """Make programs of bash, which stand in for real ones; the PATH that finds them first."""
    folder.mkdir(exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def run_program(*words, cwd: Path | str = ROOT, **environ) -> subprocess.CompletedProcess:
    """A program in the root of the project; `None` unsets a variable."""
    command = [str(word) for word in words]
    given = {name: str(x) for name, x in {**os.environ, **environ}.items() if x is not None}
    return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True)


def run_bash(*words, **environ) -> subprocess.CompletedProcess:
    return run_program("bash", *words, **environ)


def run_python(*words, **environ) -> subprocess.CompletedProcess:
    return run_program(sys.executable, *words, **environ)


def run_on_rank(rank: int, words: list) -> Done:
    """`albert-ds WORDS` of one rank, for `run_ranks`: commands that open torch.distributed."""
    return run_command(*words)


def kill_after(rank: int, words: list, step: int) -> None:
    """A trainer on one rank, for `end_ranks`; SIGKILL comes when it has logged this step."""
    from albert_ds.training.metrics import Metrics

    def write_and_die(self, at, values, write=Metrics.write):
        write(self, at, values)
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Metrics.write = write_and_die
    run_command(*words)


def kill_in_evaluation(rank: int, words: list, step: int) -> None:
    """A trainer on one rank, for `end_ranks`; SIGKILL comes between the checkpoint of a step and
    the metrics of its evaluation."""
    from albert_ds.training import pretrain as loop

    def die(run):
        while not (run.config.run / "checkpoints" / f"step-{step:08d}").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    loop.evaluate = die
    run_command(*words)


def run_main(main: Callable[[list[str]], int | None], *words) -> Done:
    """The program of this `main` with these words."""
    typed, out, err = sys.argv, *(io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    sys.argv = ["albert-ds", *map(str, words)]
    code = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.run(main)
    except SystemExit as ending:
        code = ending.code
    finally:
        sys.argv = typed
    for stream in (out, err):
        stream.seek(0)
    return Done(code, out.read(), err.read())
