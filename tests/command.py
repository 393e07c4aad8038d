"""A user's command, run to its end in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from albert_ds.__main__ import run


class Done(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def run_command(*words) -> Done:
    """`albert-ds WORDS`. A traceback is the test's own."""
    typed, out, err = sys.argv, *(io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    sys.argv = ["albert-ds", *map(str, words)]
    code = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            run()
    except SystemExit as ending:
        code = ending.code
    finally:
        sys.argv = typed
    for stream in (out, err):
        stream.seek(0)
    return Done(code, out.read(), err.read())
