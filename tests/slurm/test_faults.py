"""Real faults of a cluster: the run resumes by itself, with the same numbers."""

import json
import re
from pathlib import Path

import psutil
import pytest

from tests.command import write_scripts
from tests.conftest import finish, start_ranks, train_command
from tests.distributed import wait_for
from tests.legs import files_of, records

# A very small model; the recipe gives all other flags.
SMALL = ("--num-layers", "2", "--hidden-size", "32", "--embedding-size", "16")
STEPS = 1_000_000  # more than a test waits for: STOP ends it
LONG = (*SMALL, "--steps", str(STEPS), "--eval-every", "1000", "--num-workers", "1")
TWO_RANKS = ("--ntasks-per-node=1", "--exclusive")
WITH_SPARE = ("--nodes=3", "--no-kill", *TWO_RANKS)


def reference_command(data: Path, output: Path, **flags) -> list[str]:
    """The command line of slurm/smoke.sh, without Slurm."""
    given = dict(batch_size=32, micro_batch_size=4, steps=20, eval_every=10, eval_samples=64)
    return train_command(data, output, **{**given, "save_every": 5, **flags})


class Life:
    """A job that suffers several faults, followed through its log and metrics."""

    def __init__(self, cluster, job):
        self.cluster, self.job = cluster, job
        self.restarts = self.requeues = 0

    def step(self) -> int:
        path = self.job.output / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0

    def resumed_at(self) -> list[int]:
        return [int(n) for n in re.findall(r"resuming from \S+: step (\d+) of", self.job.says())]

    def train(self, steps: int = 3) -> None:
        """Wait for that many more steps."""
        goal = self.step() + steps
        self.cluster.wait(lambda: self.step() >= goal, f"step {goal}")

    def nodes(self) -> list[str]:
        """The nodes of the last attempt's ranks, in their order."""
        return re.findall(r"restart \d+ on (\S+), meeting", self.job.says())[-1].split(",")

    def second_rank(self) -> psutil.Process:
        return self.cluster.processes(self.nodes()[1])[0]

    def comes_back(self, what: str, *, requeued: bool) -> None:
        """Wait until the job trains again, with or without having been in the queue."""
        before = self.step()
        self.restarts += 1
        self.requeues += requeued
        self.cluster.wait(lambda: len(self.resumed_at()) >= self.restarts, f"the job after {what}")
        resumed = self.resumed_at()[-1]
        self.cluster.wait(lambda: self.step() > resumed, f"a step after {what}")
        mode = "requeued" if requeued else "same allocation"
        print(f"{what}: at step {before}, resumed at {resumed} ({mode})")
        assert int(self.cluster.job(self.job.number)["Restarts"]) >= self.requeues


def check_bits(run: Path, data: Path, alone: Path) -> int:
    """A run of LONG that was stopped is, as far, one that nothing has disturbed; its step."""
    step = json.loads((run / "exit.json").read_text())["step"]
    last = f"checkpoints/step-{step:08d}"
    flags = dict(steps=STEPS, eval_every=1000, num_workers=1, save_every=step)
    ranks = start_ranks(reference_command(data, alone, **flags), 2)
    wait_for((alone / last).is_dir, "an undisturbed run", timeout=900)
    (alone / "STOP").touch()
    assert finish(ranks) == [75, 75]
    assert files_of(run / last) == files_of(alone / last)
    assert records(run) == records(alone)[: len(records(run))]
    return step


@pytest.mark.timeout(1200)  # minutes, and many more on a busy machine
def test_one_run_survives_everything(cluster, submit, data, tmp_path):
    flags = ("--spares", "1", *LONG, "--timeout-minutes", "0.2")
    job = submit("smoke", *flags, sbatch=WITH_SPARE, DATA=str(data), MAX_WAIT="5")
    life = Life(cluster, job)
    number = str(job.number)

    life.train(6)  # the first checkpoint is at step 5
    life.second_rank().kill()
    life.comes_back("a rank killed", requeued=False)
    assert "the run with 5" in job.says()

    life.train(6)  # a checkpoint lies between two faults of one allocation
    life.second_rank().suspend()
    life.comes_back("a rank frozen", requeued=False)

    life.train()
    cluster.run("scancel", "--batch", "--signal=USR1", number)  # what the time limit sends
    life.comes_back("USR1", requeued=True)
    stopped = re.findall(r"stopped after step (\d+) of \d+: signal SIGUSR1", job.says())
    assert len(stopped) == 2  # one line a node
    assert {int(step) for step in stopped} == {life.resumed_at()[-1]}  # no step is done again
    assert "the run with 75" in job.says()

    life.train()
    dead = life.nodes()[1]
    cluster.kill_node(dead)
    life.comes_back("a node without power", requeued=False)
    assert dead not in life.nodes()

    life.train(6)
    cut = life.nodes()[1]
    cluster.set_cable(cut, "down")
    life.comes_back("a pulled cable", requeued=True)  # no spare is left
    assert not {dead, cut} & set(life.nodes())
    cluster.start_node(dead)
    cluster.set_cable(cut, "up")

    life.train()
    # One of the job's own nodes. With two, Slurm starts the job again on the one that is cleared up
    # first, while the urgent job waits for the other one, and then preempts it a second time.
    urgent = ("--partition=urgent", f"--nodelist={life.nodes()[1]}", "--nodes=1")
    cluster.run("sbatch", *urgent, "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    life.comes_back("preemption", requeued=True)

    (job.output / "STOP").touch()
    ended = cluster.wait_until_ended(job.number, timeout=600)
    # Slurm may requeue it again after that: nodes that have just come back register anew.
    assert ended["ExitCode"] == "75:0" and int(ended["Restarts"]) >= 3
    check_bits(job.output, data, tmp_path / "alone")


def test_scancel_leaves_a_checkpoint_and_a_job_that_stays_away(cluster, submit, data):
    job = submit("smoke", *LONG, sbatch=TWO_RANKS, DATA=str(data))
    Life(cluster, job).train()
    cluster.run("scancel", str(job.number))
    cluster.wait(lambda: len(cluster.idle_nodes()) == cluster.size, "the job to leave its nodes")
    ended = cluster.wait_until_ended(job.number)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    ending = json.loads((job.output / "exit.json").read_text())
    assert ending["code"] == 75 and "SIGTERM" in ending["reason"]
    newest = (job.output / "checkpoints" / "latest").read_text().strip()
    assert newest == f"step-{ending['step']:08d}"


def test_the_users_mistake_is_not_requeued(cluster, submit, data):
    job = submit("smoke", "--batch-size", "9", DATA=str(data))
    ended = cluster.wait_until_ended(job.number)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "2:0")
    assert job.says().count("albert-ds: --batch-size 9") == 2  # one line a node
    assert sorted(path.name for path in job.output.iterdir()) == [
        *(".lock", "exit.json", "history.jsonl"),
    ]


def test_a_run_in_use_is_not_requeued_and_keeps_its_ending(cluster, submit, data, tmp_path):
    from albert_ds.checkpoint.run_folder import RunLock

    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    job = submit("smoke", *SMALL, sbatch=TWO_RANKS, DATA=str(data))
    ended = cluster.wait_until_ended(job.number)
    lock.release()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "2:0")
    assert not (job.output / "exit.json").exists()


def test_a_stale_ending_fools_nobody_and_restarts_are_bounded(cluster, submit, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit.json").write_text('{"code": 0, "reason": "old", "step": 20}')
    write_scripts(tmp_path, python='[ "$1" = -c ]')
    job = submit("smoke", PYTHON=f"{tmp_path}/python", MAX_RESTARTS="1")
    ended = cluster.wait_until_ended(job.number)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "1:0")
    assert job.says().count("the run with a crash") == 2
    assert "MAX_RESTARTS=1" in job.says()
