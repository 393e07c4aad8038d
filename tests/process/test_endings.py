"""Whatever one rank meets, all ranks end together, with its code and its cause."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from albert_ds.errors import DamagedData, MachineFailed, Stopped, UserError
from albert_ds.model.config import SIZES
from albert_ds.process import heartbeat
from albert_ds.process.ending import Ending, name_ending
from albert_ds.process.heartbeat import LOST, SILENCE, TOGETHER, Beat, Judge
from tests.conftest import ROOT, finish, start_ranks, train_command
from tests.distributed import end_ranks

LOST_PEER = name_ending(
    RuntimeError("[/w/pair.cc:5] Read error [10.0.0.1]:1: Connection reset by peer. This is")
)


def judge(*moments: tuple[float, list[Beat]], timeout: float = 60) -> Ending | None:
    """What rank 0 decides after it has seen these beats, each so many seconds after the last."""
    hosts = [f"host{rank}" for rank in range(len(moments[0][1]))]
    judge = Judge(Path("RUN"), hosts, timeout)
    decided = None
    for elapsed, beats in moments:
        judge.see(beats, elapsed)
        decided = decided or judge.decide()
    return decided


def beats(count: int, *endings: Ending | None, batches: int = 1) -> list[Beat]:
    return [Beat(count=count, batches=batches, ending=ending) for ending in endings]


def test_nothing_ends_while_all_beat():
    assert judge(*[(1.0, beats(n, None, None, batches=n // 100)) for n in range(300)]) is None


def test_a_cause_wins_over_its_consequences():
    cause = Ending(2, "no such shard")
    found = judge((1, beats(1, LOST_PEER, cause)), (TOGETHER, beats(2, LOST_PEER, cause)))
    assert found == Ending(2, "rank 1 on host1: no such shard")


def test_an_ending_of_all_ranks_is_no_single_ranks():
    cause = Ending(3, "shard 7 is damaged")
    assert judge((0.1, beats(1, None, cause))) is None
    assert judge((0.1, beats(1, None, cause)), (0.1, beats(2, cause, cause))) == cause


def test_a_failure_after_the_last_step_is_the_end_of_all():
    done, full = Ending(0, "all steps done"), Ending(5, "disk full")
    assert judge((1, beats(1, None, done)), (1, beats(2, full, done))) == full


def test_the_rank_whose_beat_stands_still_is_the_lost_one():
    first, second = beats(1, LOST_PEER, None, None), beats(2, LOST_PEER, None, None)
    second[1] = first[1]
    assert judge((1, first), (LOST, second)) is None  # too soon to tell
    found = judge((1, first), (LOST + 1, second))
    assert found is not None and found.code == 5 and "rank 1 on host1 is missing" in found.reason
    assert "(Read error [10.0.0.1]:1: Connection reset by peer);" in found.reason
    assert "RUN/logs/rank-1.log" in found.reason


def test_a_rank_without_a_sign_is_dead_whatever_the_timeout():
    first, second = beats(1, None, None), beats(2, None, None)
    second[1] = first[1]
    assert judge((1, first), (SILENCE, second)) is None
    found = judge((1, first), (SILENCE + 1, second))
    assert found is not None and found.code == 5
    assert "rank 1 on host1 is missing: no sign of life for 30 s" in found.reason


def test_a_rank_that_is_behind_or_waits_for_data_is_named():
    def at(count: int, **second) -> list[Beat]:
        return [Beat(count=count, batches=2), Beat(count=count, **second)]

    found = judge((1, at(1, batches=1)), (61, at(2, batches=1)))
    assert found is not None and "rank 1 on host1 is behind the others for 1 min" in found.reason
    slow = dict(batches=2, is_reading=True)
    found = judge((1, at(1, **slow)), (61, at(2, **slow)), (61, at(3, **slow)))
    assert found is not None and "rank 1 on host1 has waited 1 min" in found.reason


def test_a_rank_that_freezes_while_it_waits_for_data_is_missing():
    def seen(second: int) -> list[Beat]:  # the other rank freezes in the third second
        first = Beat(count=second, batches=2)
        return [first, Beat(count=min(second, 3), batches=2, is_reading=True)]

    found = judge(*[(1.0, seen(second)) for second in range(1, 23)], timeout=18)
    assert found is not None and "rank 1 on host1 is missing" in found.reason


def test_a_rank_whose_beats_come_late_still_waits_for_data():
    def seen(second: int) -> list[Beat]:  # one beat every two seconds
        return [
            Beat(count=second, batches=2),
            Beat(count=second // 2, batches=2, is_reading=True),
        ]

    assert judge(*[(1.0, seen(second)) for second in range(60)]) is None
    found = judge(*[(1.0, seen(second)) for second in range(64)])
    assert found is not None and "rank 1 on host1 has waited 1 min" in found.reason


def test_a_rank_that_never_comes_to_the_end_is_named():
    done = Ending(0, "all steps done")
    found = judge((1, beats(1, done, None)), (61, beats(2, done, None)))
    assert found is not None and found.code == 5 and "rank 1 on host1" in found.reason


@pytest.mark.parametrize(
    ("kind", "text", "is_lost"),
    [
        ("RuntimeError", "[pair.cc:537] Read error [10.0.0.1]:1: Connection reset by peer", True),
        ("RuntimeError", "Gloo connectFullMesh failed with [pair.cc:144] no error", True),
        ("DistNetworkError", "failed to recv, got 0 bytes", True),
        ("DistStoreError", "wait timeout after 18000ms", True),
        ("DistBackendError", "NCCL error: remote process exited, ncclRemoteError: A call", True),
        ("DistBackendError", "NCCL error in ProcessGroupNCCL.cpp:94, ncclInvalidUsage", False),
        ("RuntimeError", "NCCL communicator was used after it was destroyed", False),
    ],
)
def test_which_errors_mean_a_lost_peer(kind, text, is_lost):
    import torch.distributed as dist

    found = name_ending(getattr(dist, kind, RuntimeError)(text))
    assert (found is not None and found.is_lost) == is_lost


def trainer(rank: int, run: str, failing: int, what: str) -> None:
    """A trainer without a model: `failing` meets `what`, the others wait in a collective."""
    import torch
    import torch.distributed as dist

    from albert_ds.process.trainer import run_trainer

    def work(process) -> None:
        process.meet(
            SimpleNamespace(  # the settings that it reads
                run=Path(run),
                model=SIZES["albert-tiny"],
                max_hours=None,
                deterministic=False,
                tensor_parallel=1,
                timeout_minutes=10,
            )
        )
        process.claim(Path(run))
        if what == "nothing":
            return
        os.write(2, b"a native stack trace")
        if rank == failing:
            time.sleep(0.5)  # the others wait by now
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "frozen":
                freeze(Path(run))
            raise FAULTS[what]
        if what == "frozen":
            time.sleep(1000)  # as in NCCL, where a lost peer is no error
        dist.all_reduce(torch.zeros(1))

    if what == "frozen":
        heartbeat.SILENCE = 5.0
    with open(f"{run}-{rank}", "w") as terminal:
        os.dup2(terminal.fileno(), 1)
        os.dup2(terminal.fileno(), 2)
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115 (pytest may have replaced it)
    sys.exit(run_trainer(["--output", run], work))


def freeze(run: Path) -> None:
    """Stop this process; a child kills it after the run has ended."""
    me = os.getpid()
    if os.fork():
        os.kill(me, signal.SIGSTOP)
    while not (run / "exit.json").exists():
        time.sleep(0.1)
    time.sleep(1)
    os.kill(me, signal.SIGKILL)
    os._exit(0)


FAULTS = {
    "user": UserError("--data: no such shard"),
    "data": DamagedData("shard 3, record 7"),
    "machine": MachineFailed("could not save"),
    "stop": Stopped("never alone"),
    "path": FileNotFoundError(errno.ENOENT, "No such file", "shard.tar"),
    "defect": AssertionError("an impossible state"),
}


def end_trainers(tmp_path: Path, failing: int, what: str) -> tuple[list[int], dict]:
    codes = end_ranks(trainer, 2, str(tmp_path / "run"), failing, what)
    return codes, json.loads((tmp_path / "run" / "exit.json").read_text())


@pytest.mark.parametrize(
    ("what", "code", "failing"),
    [("user", 2, 1), ("data", 3, 1), ("path", 2, 0), ("machine", 5, 0), ("defect", 1, 1)],
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
    # Where its main thread waits, unless the collective fails first because the peer has left.
    assert "all_reduce" in logs[1 - failing] or failing == 1
    assert "stack" not in said[0] + said[1] and "frame #" not in said[0] + said[1]


@pytest.mark.parametrize("what", ["killed", "frozen"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_is_gone_is_named_by_the_other(tmp_path, failing, what):
    codes, ending = end_trainers(tmp_path, failing, what)
    assert codes[failing] == -signal.SIGKILL and codes[1 - failing] == 5
    assert ending["code"] == 5 and ending["reason"].startswith(f"rank {failing} on ")
    assert f"{tmp_path}/run/logs/rank-{failing}.log" in ending["reason"]
    said = (tmp_path / f"run-{1 - failing}").read_text()
    assert f"albert-ds: {ending['reason']}" in said and "frame #" not in said


def test_all_ranks_come_to_a_good_end(tmp_path):
    codes, ending = end_trainers(tmp_path, 0, "nothing")
    assert codes == [0, 0] and ending["code"] == 0


LEAVING = """
import atexit, os, threading, time
from albert_ds.process.ending import SAVER_THREAD, leave_process
def save():
    time.sleep(0.5)
    print("saved", end=" ")
atexit.register(os.abort)  # as a library whose peer is gone
threading.Thread(target=save, name=SAVER_THREAD).start()
leave_process(5)
"""


def test_no_library_turns_the_code_into_an_abort_and_a_checkpoint_is_finished():
    done = subprocess.run([sys.executable, "-c", LEAVING], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 5 and done.stdout == "saved "


def test_a_file_in_the_way_of_checkpoints_ends_all_ranks(data, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("a file")
    assert finish(start_ranks(train_command(data, run), 2), timeout=200) == [2, 2]
    ending = json.loads((run / "exit.json").read_text())
    assert ending["code"] == 2 and "checkpoints" in ending["reason"]
