"""A user's command, run to its end in this process."""

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from albert_ds import __main__ as albert_ds
from albert_ds import cli


class Done(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def run_command(*words) -> Done:
    """`albert-ds WORDS`. A traceback is the test's own."""
    return run_main(albert_ds.main, *words)


def run_on_rank(rank: int, words: list) -> Done:
    """`albert-ds WORDS` of one rank, for `run_ranks`: commands that open torch.distributed."""
    return run_command(*words)


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
