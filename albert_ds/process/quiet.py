"""Keep the messages of libraries that are no news to the user off the terminal, and no others.

What C and C++ libraries write to stderr goes to RUN/logs/rank-N.log. When a peer is gone, torch
writes a stack trace of C++ for each request that fails; the terminal keeps what Python writes: the
line that says why the run ended.
"""

import faulthandler
import logging
import os
import sys
import warnings
from pathlib import Path

# Warnings about which a user can do nothing: the beginning of the message, its category, and the
# module that it blames.
WARNINGS = (
    # They would serve megatron-core's optimizers and clipping, of which none is used here.
    ("Transformer Engine and Apex are not installed", UserWarning, r"megatron\.core\."),
    # DeepSpeed and megatron-core call torch's collectives by names that are about to go.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning, r"torch\.distributed\."),
)
# The same for what DeepSpeed logs.
LOGS = (
    # It says so of every optimizer but its own; tests compare ours with references under ZeRO.
    "**** You are using ZeRO with an untested optimizer",
    # A run names its device, and one that asked for a GPU ends.
    "Setting accelerator to CPU.",
)


def quiet_libraries() -> None:
    """Silence what WARNINGS and LOGS name."""
    for message, category, module in WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.addFilter(lambda record: not record.getMessage().startswith(LOGS))


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
