"""A queue with a time limit: the commands of the page, with smaller numbers, give the same bits."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.legs import records
from tests.slurm.test_faults import LONG, check_bits
from tests.test_docs_commands import blocks_of

SMALLER = {
    "--nodes=16": "--nodes=2",
    "--ntasks-per-node=4": "--ntasks-per-node=1 --exclusive",
    "--gpus-per-node=4": "",
    "--time=10:00:00": "--time=2",  # minutes
    "slurm/base.sh": f"slurm/smoke.sh {' '.join(LONG)}",
    "--max-hours 9.7": "--max-hours 0.004",
}


@pytest.fixture
def folder(cluster, data, tmp_path):
    """Where a user types: recipes and a site file. What is left in the queue is cancelled."""
    for name in ("slurm", "ds_configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    site = f"DATA={data}\nPYTHON={sys.executable}\nINTERFACE=eth0\nexport OMP_NUM_THREADS=1\n"
    (tmp_path / "slurm/site.env").write_text(site)
    yield tmp_path
    for log in tmp_path.glob("*.out"):
        print(log.read_text()[-5000:])  # shown where the test fails
    cluster.run("scancel", "--name=albert-smoke")
    cluster.wait(lambda: len(cluster.idle_nodes()) == cluster.size, "all nodes to be idle again")


def submit(cluster, folder: Path, block: str) -> list[int]:
    for word, smaller in SMALLER.items():
        block = block.replace(word, smaller)
    said = cluster.run("bash", "-ec", block, cwd=folder)
    return [int(number) for number in re.findall(r"Submitted batch job (\d+)", said)]


@pytest.mark.timeout(1800)  # two minutes are the shortest limit, and as many steps are repeated
def test_hours_at_a_time_end_in_the_bits_of_one_run(cluster, folder, data):
    requeued, chained = blocks_of(ROOT / "docs/coming.md", "bash")
    run = folder / "runs/albert-smoke"

    def resumed_at(job: int) -> list[int]:
        log = folder / f"albert-smoke-{job}.out"
        said = log.read_text() if log.exists() else ""
        return [int(n) for n in re.findall(r"resuming from \S+: step (\d+) of", said)]

    (job,) = submit(cluster, folder, requeued)
    cluster.wait(lambda: resumed_at(job), "the job after its time limit", timeout=600)
    (after_limit,) = resumed_at(job)
    cluster.wait(lambda: records(run)[-1]["step"] > after_limit, "a step after the time limit")
    (run / "STOP").touch()
    ended = cluster.wait_until_ended(job)
    assert (ended["Restarts"], ended["ExitCode"]) == ("1", "75:0")

    (run / "STOP").unlink()
    jobs = submit(cluster, folder, chained)
    ended = [cluster.wait_until_ended(job, timeout=600) for job in jobs]
    ways = [(job["JobState"], job["Restarts"], job["ExitCode"]) for job in ended]
    assert ways == [("FAILED", "0", "75:0")] * 2, ended
    (second,), (third,) = map(resumed_at, jobs)
    assert after_limit < second <= third <= check_bits(run, data, folder / "alone")
