"""A cluster for each file, for faults may leave their mark; submitting the recipes unchanged."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.slurm.cluster import Cluster, why_not


@pytest.fixture(scope="module")
def cluster():
    reason = why_not()
    if reason and os.environ.get("ALBERT_DS_REQUIRE_SLURM"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    with Cluster(8) as started:
        yield started


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A submitted recipe: its number in the queue, its RUN, its log."""

    number: int
    output: Path  # its RUN
    log: Path  # of the batch script and all tasks

    def says(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def submit(cluster, tmp_path):
    """Submit a recipe of slurm/ on this cluster; jobs that are left are cancelled afterwards."""
    site = tmp_path / "site.env"
    site.write_text("INTERFACE=eth0\n")
    jobs = []

    def run(recipe: str, *argv: str, sbatch=(), output: Path | None = None, **environ) -> Job:
        log = tmp_path / f"{Path(recipe).name}-%j.out"
        settings = {
            "DATA": "unused",
            "OUTPUT": str(output or tmp_path / "run"),
            "PYTHON": sys.executable,
            "SITE_ENV": str(site),
            "OMP_NUM_THREADS": "1",
            **environ,
        }
        number = cluster.submit(
            *(f"slurm/{recipe}.sh", *argv),
            flags=(f"--output={log}", *sbatch),
            cwd=ROOT,
            environ=settings,
        )
        jobs.append(
            Job(
                number=number,
                output=Path(settings["OUTPUT"]),
                log=Path(str(log).replace("%j", str(number))),
            )
        )
        return jobs[-1]

    yield run
    for job in jobs:
        print(job.says()[-5000:])  # shown where a test fails
        if cluster.is_queued(job.number):
            cluster.run("scancel", str(job.number))
    cluster.wait(lambda: len(cluster.idle_nodes()) == cluster.size, "all nodes to be idle again")
