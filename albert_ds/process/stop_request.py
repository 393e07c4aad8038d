"""Requests to stop: a signal, a STOP file, the time limit, a launcher that has died.

A request is only recorded. The ranks agree before each step and leave together after a complete
checkpoint; a signal handler that saved would save different steps on different ranks.
"""

import os
import signal
import threading
import time
from pathlib import Path

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
        launcher = [pid for pid in _ancestors(self._parent) if _is_launcher(pid)]
        while self._asked is None:
            time.sleep(POLL_SECONDS)
            if os.getppid() != self._parent or any(not _is_alive(pid) for pid in launcher):
                self._asked = "the launcher is gone"


def _ancestors(pid: int) -> list[int]:
    chain = []
    while pid > 1 and Path(f"/proc/{pid}/stat").exists():
        chain.append(pid)
        # The name in parentheses may contain spaces; the parent is the second field after it.
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return chain


def _is_launcher(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return any(
        word in part
        for part in command[:4]
        if b" " not in part  # bash -c "torchrun ... &" may end before torchrun does
        for word in (b"deepspeed.launcher", b"bin/deepspeed", b"torchrun", b"torch.distributed.run")
    )


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
