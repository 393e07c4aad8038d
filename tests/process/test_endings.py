"""Whatever one rank meets, all ranks end together, with its code and its cause."""

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from albert_ds.base.errors import DamagedData, MachineFailed, Stopped, UserError
from albert_ds.process.ending import Ending, explain, leave_process
from albert_ds.process.heartbeat import (
    LOST_SECONDS,
    SILENCE_SECONDS,
    TOGETHER_SECONDS,
    Beat,
    Monitor,
)
from albert_ds.process.rendezvous import list_ranks
from tests.command import run_python
from tests.distributed import end_ranks, wait_for
from tests.finetuning import flags

LOST_PEER = explain(
    RuntimeError("[/w/pair.cc:5] Read error [10.0.0.1]:1: Connection reset by peer. This is")
)
DONE = Ending(0, "all steps done")
DAMAGED = Ending(3, "shard 7 is damaged")
FULL = Ending(5, "disk full")
WRONG = Ending(2, "no such shard")


def monitor(*moments: tuple[float, list], timeout: float = 60) -> Ending | None:
    """The verdict after these seconds with these endings by rank; "silent": it did not beat."""
    size = len(moments[0][1])
    watching = Monitor(Path("RUN"), [f"host{rank}" for rank in range(size)], timeout)
    counts = [0] * size
    verdict = None
    for elapsed, states in moments:
        counts = [count + (what != "silent") for count, what in zip(counts, states, strict=True)]
        endings = [None if what == "silent" else what for what in states]
        beats = [Beat(count=c, ending=e) for c, e in zip(counts, endings, strict=True)]
        watching.update(beats, elapsed)
        verdict = verdict or watching.verdict()
    return verdict


ALIVE = (1.0, [None, None])
VERDICTS = {
    "all beat": ([ALIVE] * 300, None),
    "a cause wins over its consequences": (
        [(1.0, [LOST_PEER, WRONG]), (TOGETHER_SECONDS, [LOST_PEER, WRONG])],
        (2, "rank 1 on host1: no such shard"),
    ),
    "one rank is the first to come to an ending of all": ([(0.1, [None, DAMAGED])], None),
    "an ending of all ranks is no single rank's": (
        [(0.1, [None, DAMAGED]), (0.1, [DAMAGED, DAMAGED])],
        (3, "shard 7 is damaged"),
    ),
    "a failure after the last step": ([(1.0, [None, DONE]), (1.0, [FULL, DONE])], (5, "disk full")),
    "too soon to tell who is lost": ([ALIVE, (LOST_SECONDS, [LOST_PEER, "silent"])], None),
    "lost": (
        [ALIVE, (LOST_SECONDS + 1, [LOST_PEER, "silent"])],
        (5, "rank 1 on host1 is missing (Read error [10.0.0.1]:1: Connection reset by peer);"),
    ),
    "silent, but not for long": ([ALIVE, (SILENCE_SECONDS, [None, "silent"])], None),
    "silent": (
        [ALIVE, (SILENCE_SECONDS + 1, [None, "silent"])],
        (5, "rank 1 on host1 is missing: no sign of life for 30 s"),
    ),
    "stuck while the collective of the other fails": (
        [ALIVE, *[(1.0, [LOST_PEER, None])] * 11],
        (5, "rank 1 on host1 keeps the others waiting (Read error"),
    ),
    "never comes to the end": (
        [(1.0, [DONE, None]), (61.0, [DONE, None])],
        (5, "rank 1 on host1 keeps the others waiting"),
    ),
    "all have lost somebody": (
        [(1.0, [LOST_PEER] * 2), *[(1.0, [LOST_PEER] * 2)] * 11],
        (5, "a peer is missing (Read error"),
    ),
}


def test_the_verdict_names_the_rank_that_is_the_cause():
    for name, (moments, expected) in VERDICTS.items():
        verdict = monitor(*moments)
        if expected is None:
            assert verdict is None, name
        else:
            assert verdict is not None and verdict.code == expected[0], name
            assert verdict.reason.startswith(expected[1]), (name, verdict.reason)
            is_watched = verdict.code == 5 and verdict.reason.startswith("rank 1")
            assert ("RUN/logs/rank-1.log" in verdict.reason) == is_watched, name


def test_many_ranks_make_a_short_line():
    assert list_ranks([3]) == "rank 3"
    assert list_ranks(list(range(12))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (12 in all)"


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
CODES = [  # of torch's errors; "lost": 5, and only the consequence of another rank's end
    ("RuntimeError", "[pair.cc:537] Read error [10.0.0.1]:1: Connection reset by peer", "lost"),
    ("RuntimeError", "Gloo connectFullMesh failed with [pair.cc:144] no error", "lost"),
    ("DistNetworkError", "failed to recv, got 0 bytes", "lost"),
    ("DistStoreError", "wait timeout after 18000ms", "lost"),
    ("DistBackendError", "NCCL error: remote process exited, ncclRemoteError: A call", "lost"),
    ("DistBackendError", "NCCL error in ProcessGroupNCCL.cpp:94, ncclInvalidUsage", 1),
    ("RuntimeError", "NCCL communicator was used after it was destroyed", 1),
    ("RuntimeError", "NCCL timeout", 1),
    ("RuntimeError", "shape '[2]' is invalid", 1),
    ("RuntimeError", "CUDA error: device-side assert triggered", 1),
    ("RuntimeError", OUT_OF_MEMORY, 2),
    ("RuntimeError", "CUDA error: out of memory", 2),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED in `cublasCreate(handle)`", 2),
    ("RuntimeError", "NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'", 2),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered", 5),
    ("RuntimeError", "CUDA error: unspecified launch failure", 5),
    ("RuntimeError", "NCCL error: unhandled cuda error. Cuda failure 719 'launch failure'", 5),
    ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. ", 5),
    ("RuntimeError", "DataLoader timed out after 600 seconds", 5),
]


def test_what_an_error_of_torch_means():
    import torch.distributed as dist

    for kind, text, code in CODES:
        ending = explain(getattr(dist, kind, RuntimeError)(text))
        assert ending.is_secondary == (code == "lost"), text
        assert ending.code == (5 if code == "lost" else code), text
        assert "\n" not in ending.reason and (code == 1 or text[20:40] in ending.reason), text


def test_what_an_error_of_a_file_means():
    for number, code in ((errno.ENOENT, 2), (errno.ENOSPC, 5), (errno.EMFILE, 5), (errno.EIO, 5)):
        assert explain(OSError(number, os.strerror(number), "RUN/x")).code == code
    in_gloo = explain(RuntimeError("[enforce fail at loop.cc:48] pipe: Too many open files"))
    assert in_gloo.code == 5 and "pipe: Too many open files" in in_gloo.reason
    assert explain(RuntimeError("Cannot resolve 127.0.0.1 to a (local) address")).code == 5
    assert explain(RuntimeError("Symlink loop from 'RUN'")).code == 2
    assert explain(OSError("a library's own")).reason.startswith("a library's own")


def trainer(rank: int, run: str, failing: int, what: str) -> None:
    """A trainer without a model: `failing` meets `what`, the others wait in a collective."""
    import torch
    import torch.distributed as dist

    from albert_ds.process import heartbeat
    from albert_ds.training.trainer import TrainerProcess

    with open(f"{run}-{rank}", "w") as terminal:
        os.dup2(terminal.fileno(), 1)
        os.dup2(terminal.fileno(), 2)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115 (pytest may have replaced it)
    with TrainerProcess(["--output", run]) as process:
        process.read_world()
        given = dict(max_hours=None, tensor_parallel=1, deterministic=False, timeout_minutes=10)
        process.connect(SimpleNamespace(**given), {})
        process.lock()
        if what != "nothing":
            os.write(2, b"a native stack trace")
            dist.barrier()  # the other waits in the next collective, or will
            if rank == failing:
                if what == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "frozen":
                    freeze(Path(run))
                raise FAULTS[what]
            if what == "frozen":
                # Not before both are there: a busy machine may delay a beat.
                heartbeat.SILENCE_SECONDS = 3.0
                signal.pause()  # as in NCCL, where a lost peer is no error
            dist.all_reduce(torch.zeros(1))
    sys.exit(process.code)


def freeze(run: Path) -> None:
    """Stop this process; a child kills it after the run has ended."""
    me = os.getpid()
    if os.fork():
        os.kill(me, signal.SIGSTOP)
    try:
        wait_for((run / "exit.json").exists, "exit.json")
    finally:
        os.kill(me, signal.SIGKILL)
        os._exit(0)


FAULTS = {
    "user": UserError("--data: no such shard"),
    "data": DamagedData("shard 3, record 7"),
    "machine": MachineFailed("could not save"),
    "stop": Stopped("never alone"),
    "path": FileNotFoundError(errno.ENOENT, "No such file", "shard.tar"),
    "memory": RuntimeError(OUT_OF_MEMORY),
    "defect": AssertionError("an impossible state"),
}


def end_trainers(tmp_path: Path, failing: int, what: str) -> tuple[list[int], dict]:
    codes = end_ranks(trainer, 2, str(tmp_path / "run"), failing, what)
    return codes, json.loads((tmp_path / "run" / "exit.json").read_text())


@pytest.mark.parametrize(
    ("what", "code", "failing"),
    [
        ("user", 2, 1),
        pytest.param("data", 3, 1, marks=pytest.mark.nightly),
        pytest.param("path", 2, 0, marks=pytest.mark.nightly),
        ("memory", 2, 0),
        pytest.param("machine", 5, 0, marks=pytest.mark.nightly),
        ("defect", 1, 1),
    ],
)
def test_a_fault_of_one_rank_ends_all_with_its_code_and_cause(tmp_path, what, code, failing):
    codes, ending = end_trainers(tmp_path, failing, what)
    assert codes == [code, code]
    assert ending["code"] == code and ending["reason"].startswith(f"rank {failing} on ")
    cause = FAULTS[what]
    assert (getattr(cause, "filename", None) or str(cause)) in ending["reason"]
    said = [(tmp_path / f"run-{rank}").read_text() for rank in range(2)]
    assert f"albert-ds: {ending['reason']}" in said[0]
    assert ("Traceback" in said[failing]) == (what == "defect")
    assert "Traceback" not in said[1 - failing]
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert all("a native stack trace" in log for log in logs)
    assert "stack" not in said[0] + said[1] and "frame #" not in said[0] + said[1]


@pytest.mark.parametrize(
    ("failing", "what"),
    [
        (0, "killed"),
        (1, "frozen"),
        pytest.param(1, "killed", marks=pytest.mark.nightly),
        pytest.param(0, "frozen", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_is_gone_is_named_by_the_other(tmp_path, failing, what):
    codes, ending = end_trainers(tmp_path, failing, what)
    assert codes[failing] == -signal.SIGKILL and codes[1 - failing] == 5
    assert ending["code"] == 5 and ending["reason"].startswith(f"rank {failing} on ")
    assert f"{tmp_path}/run/logs/rank-{failing}.log" in ending["reason"]
    said = (tmp_path / f"run-{1 - failing}").read_text()
    assert f"albert-ds: {ending['reason']}" in said and "frame #" not in said


def leave(rank: int, path: str) -> None:
    """Leave while a library would abort and a checkpoint is being written."""
    import atexit

    atexit.register(os.abort)
    leaving = threading.Event()

    def save() -> None:
        leaving.wait()
        time.sleep(0.2)
        Path(path).write_text("saved")

    threading.Thread(target=save).start()
    leaving.set()
    leave_process(5)


# Python's last exit handler starts collectives whose tensors gloo's threads let go of when the
# interpreter is already ending.
LATE = """
import atexit, runpy, sys, threading, torch
import torch.distributed as dist
from concurrent.futures import ThreadPoolExecutor

groups, pool = [], ThreadPoolExecutor(1)
idle = pool.submit(threading.current_thread).result()

def keep_group(end=dist.destroy_process_group):
    groups.append(dist.group.WORLD)
    end()

def begin_late():
    print("is idle" if idle.is_alive() else "has ended", flush=True)
    sys.setswitchinterval(100)
    for _ in range(2000):
        groups[0].allreduce([torch.zeros(1)])

atexit.register(begin_late)
dist.destroy_process_group = keep_group
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("program", [["finetune.py"], ["__main__.py", "finetune"]])
def test_a_thread_of_gloo_that_is_late_aborts_nothing(checkpoint, cola, tmp_path, program):
    argv = flags("glue/cola", cola, checkpoint, tmp_path / "out", steps=1)
    done = run_python("-c", LATE, f"albert_ds/{program[0]}", *program[1:], *argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("has ended\n")  # a library's pool


def test_no_library_turns_the_code_into_an_abort_and_a_checkpoint_is_finished(tmp_path):
    assert end_ranks(leave, 1, str(tmp_path / "file")) == [5]
    assert (tmp_path / "file").read_text() == "saved"
