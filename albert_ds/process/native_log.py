"""What C and C++ libraries write to stderr: to RUN/logs/rank-N.log instead of the terminal.

When a peer is gone, torch writes a stack trace of C++ for each request that fails. The terminal
keeps what Python writes: the line that says why the run ended.
"""

import faulthandler
import os
import sys
from pathlib import Path


class NativeLog:
    """Takes over file descriptor 2; `sys.stderr` goes on to the terminal."""

    def __init__(self):
        stderr = sys.stderr
        stderr.flush()
        terminal = os.dup(2)
        sys.stderr = open(  # noqa: SIM115 (open during the run)
            terminal, "w", buffering=1, encoding=stderr.encoding, errors=stderr.errors
        )
        faulthandler.enable(sys.stderr)
        self._early = os.memfd_create("native messages")
        os.dup2(self._early, 2)

    def keep_in(self, path: Path) -> None:
        """Append to `path` from now on, after what came before RUN was there. Raises OSError."""
        path.parent.mkdir(exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 2)
        os.close(log)
        os.write(2, os.pread(self._early, os.fstat(self._early).st_size, 0))
        faulthandler.enable(2)


def name_log(run: Path, ranks: list[int]) -> Path:
    """The log of one rank; the folder of logs for several."""
    return run / "logs" / (f"rank-{ranks[0]}.log" if len(ranks) == 1 else "")
