"""How a process ends: what its error means, RUN/exit.json, one line for the user, and leaving.

Launchers change exit codes (`srun -K` reports 143 for a 5), so scripts read exit.json. It is
written before any rank leaves; if it is missing, the run crashed.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple, NoReturn

from albert_ds.base.cli import log_line
from albert_ds.base.errors import ENDINGS, MachineFailed, Stopped, UserError, name_system_error
from albert_ds.base.files import write_file
from albert_ds.process.world import World

UNTOUCHED = "; saved checkpoints are untouched"
DEFECT = 1  # exit code of an error that is none of errors.py
# torch's errors for a lost peer: types of the store's, only words of the collectives'.
STORE_ERRORS = ("DistNetworkError", "DistStoreError")
PEER_LOST = (
    *("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out"),
    *("Application timeout", "Gloo connectFullMesh failed"),
    *("ncclRemoteError", "ncclSystemError", "remote process exited"),
)
SAVING_SECONDS = 60.0  # how long a checkpoint that is being written may delay the end


class Ending(NamedTuple):
    """How a rank, or a run, ends."""

    code: int
    reason: str
    is_secondary: bool = False  # this rank failed because another one died

    @property
    def is_orderly(self) -> bool:
        """All ranks come to it together, and none waits for another."""
        return self.code in (0, Stopped.code)


def explain(error: Exception) -> Ending:
    """What an error means for the run; code DEFECT if it is a defect of this program."""
    if isinstance(error, OSError | RuntimeError):
        error = name_system_error(error, UNTOUCHED)
    if isinstance(error, ENDINGS):
        return Ending(error.code, str(error))
    if isinstance(error, RuntimeError):
        text = re.sub(r"^\[/\S+\] ", "", " ".join(str(error).split()))  # gloo's own file and line
        what = text.partition(". ")[0][:160]
        is_of_store = type(error).__name__ in STORE_ERRORS
        if is_of_store or any(words in text for words in PEER_LOST):
            reason = f"a peer is missing ({what}){UNTOUCHED}"
            return Ending(MachineFailed.code, reason, is_secondary=True)
        if what.startswith("DataLoader worker"):
            reason = f"a loader's worker died, perhaps for lack of memory ({what}){UNTOUCHED}"
            return Ending(MachineFailed.code, reason)
        if what.startswith("DataLoader timed out"):
            cause = "the storage of the shards does not answer, or /dev/shm is full"
            reason = f"no data: {cause} ({what}){UNTOUCHED}"
            return Ending(MachineFailed.code, reason)
        if re.search(r"cuda|cublas|cudnn", text, re.IGNORECASE):
            if "out of memory" in text or "ALLOC_FAILED" in text:
                return Ending(
                    UserError.code,
                    "out of GPU memory: lower --micro-batch-size, or pretrain with "
                    f"--activation-checkpointing block ({text[:120]})",
                )
            match = re.search(
                r"CUDA error: |CUDA driver error|Cuda failure|uncorrectable ECC", text
            )
            if match and "device-side assert" not in text:  # that is a defect of this program
                return Ending(MachineFailed.code, f"GPU failed ({text[:160]}){UNTOUCHED}")
    what = " ".join(traceback.format_exception_only(error)[-1].split())[:300]
    return Ending(DEFECT, f"a defect of albert-ds: {what}{UNTOUCHED}")


def write_exit(run: Path, ending: Ending, step: int | None, *, replace: bool = True) -> None:
    """Write RUN/exit.json, without `replace` only if there is none, and its line of history."""
    path = run / "exit.json"
    record = {"code": ending.code, "reason": ending.reason, "step": step}
    content = json.dumps(record) + "\n"
    try:
        if replace:
            write_file(path, content)
        else:
            with path.open("x") as file:
                file.write(content)
        add_to_history(run, "end", **record)
    except FileExistsError:
        pass  # another rank was first
    except OSError as error:  # a full disk, for example; scripts then see a crash
        log_line(f"{path}: {error.strerror}")


def add_to_history(run: Path, event: str, **facts: str | int | None) -> None:
    """Append a line to RUN/history.jsonl, which keeps every start and end of a run.

    A start without an end was killed, or crashed. Raises OSError.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with (run / "history.jsonl").open("a") as file:
        file.write(json.dumps({"time": now, "event": event, **facts}) + "\n")


def print_ending(world: World, ending: Ending) -> None:
    """One line for the user, from one rank of each machine; from rank 1 if rank 0 is gone."""
    if ending.code and (world.local_rank == 0 or (ending.is_secondary and world.rank == 1)):
        log_line(ending.reason)


def run_trainer(main: Callable[[list[str]], int | None], argv: list[str]) -> NoReturn:
    """Run a trainer and leave with its code when threads and Python's exit handlers are done.

    If the interpreter ended too, a thread of gloo that has yet to let go of the last collective's
    tensor would abort the process: "terminate called without an active exception".
    """
    code = main(argv) or 0
    # Idle pools of libraries end too; leave_process would wait for them.
    threading._shutdown()  # ty: ignore[missing-attribute]
    atexit._run_exitfuncs()
    leave_process(code)


def leave_process(code: int) -> NoReturn:
    """End this process now, although its peers may be gone and its main thread may hang.

    A library that tidies up after a lost peer can hang or abort, so none gets the chance. What
    must not be lost is finished first: the output, and a checkpoint that is being written. Its
    thread is the kind that Python itself waits for, no daemon.
    """
    until = time.monotonic() + SAVING_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (
            threading.main_thread(),
            threading.current_thread(),
        ):
            thread.join(max(until - time.monotonic(), 0))
    for worker in multiprocessing.active_children():
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
