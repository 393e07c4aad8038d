"""What the batch script does after each ending; a program that plays endings is the trainer."""

import re

import pytest

from tests.command import write_scripts

# `play N` is what attempt N of the run does on its first rank; the others only wait for it.
STAND_IN = """\
[ "$1" != -c ] || exit 0  # albert-ds is installed
ending() { echo "{\\"code\\": $1, \\"reason\\": \\"$2\\"}" > "$OUTPUT/exit.json"; exit "$1"; }
saves() { mkdir -p "$OUTPUT/checkpoints" && echo "$1" > "$OUTPUT/checkpoints/latest"; }
node() { scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$1p"; }
[ "$SLURM_PROCID" = 0 ] || exit 5
echo "asked: $*"
attempt=$(ls "$OUTPUT" | grep -c attempt-)
touch "$OUTPUT/attempt-$attempt"
PLAY
ending 0
"""
ONE_SPARE = ("--nodes=3", "--ntasks-per-node=1", "--no-kill", "--exclusive")


@pytest.fixture
def stand_in(tmp_path):
    def write(play: str) -> str:
        write_scripts(tmp_path, python=STAND_IN.replace("PLAY", play))
        return f"{tmp_path}/python"

    return write


def places(job) -> list[tuple[str, list[str]]]:
    """The number and the nodes of each attempt."""
    attempts = re.findall(r"restart (\d+) on (\S+), meeting", job.says())
    return [(number, names.split(",")) for number, names in attempts]


def test_faults_stay_in_the_allocation_while_checkpoints_are_saved(cluster, submit, stand_in):
    play = """case $attempt in
        0) ending 5 "rank 1 on $(node 2): missing" ;;
        1) saves step-1; ending 5 "GPU failed" ;;
        2) exit 1 ;;
    esac"""
    job = submit("smoke", "--spares", "1", sbatch=ONE_SPARE, PYTHON=stand_in(play))
    ended = cluster.wait_until_ended(job.number)
    # The third failure is the second from step-1, so only that one is left to the queue.
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.says()
    assert [number for number, _ in places(job)] == ["0", "1", "2", "1"]
    first, second, third, _ = (nodes for _, nodes in places(job))
    assert len({*first, *second}) == 3 and first[0] == second[0]  # the spare instead of the named
    assert second == third  # nothing is named, so nothing changes
    assert "--spares" not in "".join(re.findall("asked: (.*)", job.says()))


def test_a_job_without_its_first_node_is_requeued(cluster, submit, stand_in):
    """With --no-kill Slurm keeps it running, without the script that would restart it."""
    play = "[ $attempt = 0 ] && sleep 600"
    job = submit("smoke", "--spares", "1", sbatch=ONE_SPARE, PYTHON=stand_in(play))
    cluster.wait(lambda: "asked" in job.says() and "watches" in job.says(), "the first attempt")
    first = places(job)[0][1][0]
    cluster.kill_node(first)
    try:
        ended = cluster.wait_until_ended(job.number)
    finally:
        cluster.start_node(first)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.says()
    assert first not in places(job)[1][1]


def test_each_task_of_an_array_is_a_run_of_a_grid_and_requeued_alone(cluster, submit, stand_in):
    play = "[ $SLURM_ARRAY_TASK_ID$attempt = 10 ] && ending 75 'the time limit'"
    job = submit("smoke", sbatch=("--array=0-1",), PYTHON=stand_in(play), GRID="--seed 5 6")
    tasks = [f"{job.number}_{seed}" for seed in (0, 1)]
    # The last task's number is the array's, too.
    ended = [cluster.wait_until_ended(task) for task in tasks]
    assert [task["Restarts"] for task in ended] == ["0", "1"]
    assert {task["JobState"] for task in ended} == {"COMPLETED"}
    assert sorted(path.name for path in job.output.iterdir()) == ["seed-5", "seed-6"]
    assert len(list((job.output / "seed-6").glob("attempt-*"))) == 2
