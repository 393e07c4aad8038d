"""A case, and how it ended."""

import contextlib
import io
import signal
from collections.abc import Callable
from typing import NamedTuple

from albert_ds.base.errors import DamagedData, UserError

LIMIT = 120.0  # seconds after which a case hangs; each takes milliseconds
AS_PROMISED, TRACEBACK, HANG, WRONG = "as promised", "traceback", "hang", "silently wrong"
VERDICTS = (AS_PROMISED, TRACEBACK, HANG, WRONG)


class Case(NamedTuple):
    """`run` accepts the input or refuses it; it raises SilentlyWrong where it may do neither."""

    what: str
    run: Callable[[], object]


class SilentlyWrong(AssertionError):
    """Wrong input was accepted, or read as something else."""


class Hang(BaseException):
    """A case took longer than LIMIT."""


def must_refuse(read: Callable[[], object]) -> Callable[[], object]:
    """The same reader, of input that is wrong beyond doubt."""

    def run():
        raise SilentlyWrong(f"accepted as {str(read())[:200]}")

    return run


def judge(case: Case) -> tuple[str, str]:
    """(one of VERDICTS, what was said)."""

    def stop(*_):
        raise Hang

    previous = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, LIMIT)  # pytest's own limit uses it too
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            case.run()
    except (UserError, DamagedData) as error:
        message = str(error)
        is_line = bool(message.strip()) and "\n" not in message
        return (AS_PROMISED, message) if is_line else (TRACEBACK, f"not one line: {message!r}")
    except SilentlyWrong as error:
        return WRONG, str(error)
    except Hang:
        return HANG, ""
    except BaseException as error:  # SystemExit too: a reader does not end the process
        return TRACEBACK, f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, left)
    return AS_PROMISED, "accepted"
