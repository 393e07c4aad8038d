"""The RUN folder's lock, its record of versions, the reasons to end a run, and RUN/exit.json.

Launchers change exit codes (`srun -K` reports 143 for a 5), so scripts read the file. It is written
before any rank leaves; where it is missing, the run crashed.
"""

import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.cli import log_line
from albert_ds.errors import Diverged, MachineFailed, UserError, name_os_error
from albert_ds.files import write_file

if TYPE_CHECKING:
    from albert_ds.runtime.engine import Engine

# torch's errors for a lost peer have no type of their own, only these words.
PEER_LOST = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "NCCL")
UNTOUCHED = "; saved checkpoints are untouched"
GRACE_SECONDS = 2.0  # rank 0 writes exit.json before our exit makes a launcher kill it
# A non-finite gradient skips its step; fp16 needs up to 17 of these to find its loss scale.
MAX_SKIPPED_IN_A_ROW = 20
DRIFT_CHECK_EVERY = 100  # steps


class RunLock:
    """Exclusive ownership of a RUN folder. The kernel releases it when the process dies."""

    def __init__(self, output: Path):
        self._path = output / ".lock"
        self._file = open(self._path, "a+")  # noqa: SIM115 (open during the run)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            owner = self._file.read().strip()
            self._file.close()
            raise UserError(f"--output {output}: in use by {owner}; wait or stop it") from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}")
        self._file.flush()

    def find_loss(self) -> MachineFailed | None:
        """The error to end with where the file at RUN/.lock is no longer the one that was locked.

        RUN was deleted, renamed or unmounted then, and another run may own the path.
        """
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return None
            found = "it is another file now"
        except OSError as error:
            found = error.strerror
        return MachineFailed(
            f"{self._path}: {found}: {self._path.parent} was deleted, renamed, replaced or "
            "unmounted during the run; nothing more was written there"
        )

    def release(self) -> None:
        self._file.close()


def lock_run_folder(output: Path, mesh, write_files: Callable[[], None]) -> RunLock | None:
    """Lock RUN, delete the last exit.json and write the run's files, all on rank 0. Collective.

    Returns the lock, None on other ranks. Raises UserError or MachineFailed on every rank where RUN
    is in use or cannot be written.
    """
    from albert_ds.runtime.consensus import raise_first_error

    lock, error = None, None
    if mesh.rank == 0:
        try:
            output.mkdir(parents=True, exist_ok=True)
            lock = RunLock(output)
            (output / "exit.json").unlink(missing_ok=True)
            write_files()
        except UserError as caught:
            error = caught
        except OSError as caught:
            error = name_os_error(caught, UNTOUCHED)
    raise_first_error(mesh, error)
    return lock


def finish_run(
    world,
    mesh,
    lock: RunLock | None,
    output: Path | None,
    *,
    code: int,
    reason: str,
    step,
    heartbeat=None,
) -> None:
    """Write exit.json, print the reason, and leave the process group."""
    from albert_ds.runtime.rendezvous import leave_world

    if heartbeat is not None:
        heartbeat.close()
    rank, local_rank = (world.rank, world.local_rank) if world else (0, 0)
    if rank == 0 and output is not None and _is_ours(output, lock):
        try:
            write_exit(output, code=code, reason=reason, step=step)
        except OSError as error:  # a full disk, for example; scripts then see a crash
            log_line(f"{output / 'exit.json'}: {error.strerror}")
    if code != 0 and local_rank == 0:
        log_line(reason)
    if mesh is None and rank > 0:
        time.sleep(GRACE_SECONDS)
    if mesh is not None:
        leave_world(mesh, together=code != MachineFailed.code)


def _is_ours(output: Path, lock: RunLock | None) -> bool:
    """Whether RUN is there and no other process owns it, whose exit.json is not ours to write."""
    if lock is not None:
        return lock.find_loss() is None
    if not os.path.isdir(output):
        return False
    try:
        RunLock(output).release()
    except (UserError, OSError):
        return False
    return True


def write_exit(output: Path, *, code: int, reason: str, step: int | None) -> None:
    """Write RUN/exit.json. Raises OSError."""
    ending = {"code": code, "reason": reason, "step": step}
    write_file(output / "exit.json", json.dumps(ending) + "\n")


def name_failure(error: RuntimeError | OSError, heartbeat=None) -> tuple[int, str]:
    """Exit code and message for a failure of the machine; raises any other error again."""
    if isinstance(error, OSError):
        named = name_os_error(error, UNTOUCHED)
        return named.code, str(named)
    failure = name_device_failure(error)
    if failure is not None:
        if heartbeat is not None:
            heartbeat.end_all(*failure)
        return failure
    return name_lost_peer(error, heartbeat)


def name_device_failure(error: RuntimeError) -> tuple[int, str] | None:
    """Exit code and message for an error of CUDA; None for any other error.

    A failed assertion in a kernel is not among them: it is a defect of this program.
    """
    text = " ".join(str(error).split())
    if not re.search(r"cuda|cublas|cudnn", text, re.IGNORECASE):
        return None
    if "out of memory" in text or "ALLOC_FAILED" in text:
        return UserError.code, (
            f"out of GPU memory: lower --micro-batch-size, or use --activation-checkpointing block "
            f"({text[:120]})"
        )
    found = re.search(r"CUDA error: |CUDA driver error|Cuda failure|uncorrectable ECC", text)
    if found is None or "device-side assert" in text:
        return None
    return MachineFailed.code, f"GPU failed ({text[:160]}); saved checkpoints are untouched"


def name_lost_peer(error: RuntimeError, heartbeat=None) -> tuple[int, str]:
    """Exit code and message for a collective that failed because a peer is gone.

    Raises any other error again: it is a defect of this program.
    """
    if not any(text in str(error) for text in PEER_LOST):
        raise error
    who = (heartbeat and heartbeat.name_missing()) or "a peer"
    what = str(error).splitlines()[0][:160]
    return MachineFailed.code, f"{who} is missing ({what}); saved checkpoints are untouched"


def end_hung_run(world, output: Path, reason: str, *, code: int = MachineFailed.code) -> None:
    """End this process from a thread while its main thread hangs in a collective."""
    if world.rank == 0:
        with suppress(OSError):  # a RUN that is gone must not keep this process
            write_exit(output, code=code, reason=reason, step=None)
    if world.local_rank == 0:
        log_line(reason)
    if world.rank > 0 and code != MachineFailed.code:
        time.sleep(GRACE_SECONDS)
    os._exit(code)


def check_health(engine: "Engine", *, step: int, skipped_in_a_row: int, output: Path) -> None:
    """Raise Diverged after too many skipped steps. Collective over tensor-parallel peers.

    Every `DRIFT_CHECK_EVERY` steps also assert that replicated parameters are equal bit for bit.
    """
    if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise diverged(step, skipped_in_a_row, output)
    if step % DRIFT_CHECK_EVERY == 0:
        from albert_ds.parallel.tensor import find_drift

        drifted = find_drift(engine.deepspeed.module, engine.mesh)
        assert not drifted, f"replicas differ across tensor-parallel peers: {drifted}"


def diverged(step: int, skipped_in_a_row: int, output: Path) -> Diverged:
    """The ending of a run whose last steps were all skipped."""
    from albert_ds.runtime.checkpoint_files import describe_saved

    return Diverged(
        f"the gradient was not finite {skipped_in_a_row} steps in a row, up to step {step}; "
        f"{describe_saved(output)}"
    )


def read_versions() -> dict[str, str | None]:
    """Versions of the libraries that change results, and the commit."""
    libraries = ("torch", "deepspeed", "megatron-core", "webdataset", "sentencepiece", "numpy")
    return {**{name: version(name) for name in libraries}, "commit": read_commit()}


def read_commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None outside a checkout."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+"]
    if not (root / ".git").exists():
        return None
    found = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    return found.stdout.strip() or None
