"""Requests to stop: a signal, a STOP file, the time limit, a launcher that has died.

A request is only recorded. The ranks agree before each step and leave together after a complete
checkpoint; a signal handler that saved would save different steps on different ranks.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
POLL_SECONDS = 1.0


class StopRequest:
    """`reason` is None until this rank is asked to stop.

    stop_file: RUN/STOP, on rank 0 alone: RUN may be on a file system of a whole cluster.
    """

    def __init__(self, stop_file: Path | None, max_hours: float | None, *, has_launcher: bool):
        self._asked: str | None = None
        self._stop_file = stop_file
        self._max_hours = max_hours
        self._deadline = time.monotonic() + 3600 * max_hours if max_hours is not None else None
        for number in SIGNALS:
            signal.signal(number, self._note)
        # Without a launcher the parent is a shell, and a run outlives it: nohup, a lost connection.
        if has_launcher:
            self._parent = os.getppid()
            threading.Thread(target=self._watch_launcher, daemon=True).start()

    @property
    def reason(self) -> str | None:
        if self._asked:
            return self._asked
        if self._deadline is not None and time.monotonic() > self._deadline:
            return f"--max-hours {self._max_hours:g} is over"
        if self._stop_file is not None and self._stop_file.exists():
            return f"{self._stop_file} exists"
        return None

    def _note(self, number: int, frame) -> None:
        self._asked = f"signal {signal.Signals(number).name}"

    def _watch_launcher(self) -> None:
        """Stop when the launcher is gone: a killed `deepspeed` leaves its ranks running."""
        launcher: list[psutil.Process] = []
        with suppress(psutil.Error):  # /proc may hide what others run
            parent = psutil.Process(self._parent)
            launcher = [one for one in (parent, *parent.parents()) if _is_launcher(one)]
        while self._asked is None:
            time.sleep(POLL_SECONDS)
            if os.getppid() != self._parent or not all(map(_is_alive, launcher)):
                self._asked = "the launcher is gone"


def _is_launcher(process: psutil.Process) -> bool:
    names = ("deepspeed.launcher", "bin/deepspeed", "torchrun", "torch.distributed.run")
    # Of bash -c "torchrun ... &" no word counts: it may end before torchrun does.
    words = [word for word in process.cmdline()[:4] if " " not in word]
    return any(name in word for word in words for name in names)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
