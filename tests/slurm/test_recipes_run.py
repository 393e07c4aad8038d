"""Every recipe, unchanged, on a cluster of the size that it states.

A script that prints its rank and node replaces the programs, so that 64 ranks run here on 8 nodes
with 8 fake GPUs each. srun, the environment and the batch script are real.
"""

import json
import re
from pathlib import Path

import pytest

from tests.command import write_scripts
from tests.conftest import ROOT
from tests.test_recipes import RECIPES, sbatch_option

STAND_IN = """[ "$1" != -c ] || exit 0  # albert-ds is installed
echo "task $SLURM_PROCID $SLURM_LOCALID $SLURM_NTASKS $SLURMD_NODENAME \\
    ${CUDA_VISIBLE_DEVICES:-none} $MASTER_ADDR $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"
[ "$SLURM_PROCID" = 0 ] && echo '{"code": 0}' > "$OUTPUT/exit.json"
exit 0
"""
ASKED = {"TASK": "glue/mrpc", "TASK_DATA": "mrpc", "CHECKPOINT": "run"}
ASKED |= {"TEXT": "text/*", "VOCAB": "spiece.model", "MPI": "none"}


@pytest.fixture
def stand_in(tmp_path):
    write_scripts(tmp_path, python=STAND_IN)
    return {"PYTHON": f"{tmp_path}/python", "REPORT": f"{tmp_path}/report", **ASKED}


def tasks_of(job) -> list[dict]:
    names = ("rank", "local_rank", "size", "node", "devices", "head", "nccl", "gloo")
    lines = re.findall(r"^task (.*)$", job.says(), re.M)
    return [dict(zip(names, line.split(), strict=True)) for line in lines]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipe_runs_at_its_stated_size(cluster, submit, stand_in, recipe):
    nodes = int(sbatch_option(recipe, "nodes"))
    per_node = int(sbatch_option(recipe, "ntasks-per-node"))
    cluster.run("sbatch", "--test-only", f"slurm/{recipe.name}", cwd=ROOT)
    job = submit(recipe.stem, **stand_in)
    assert cluster.wait_until_ended(job.number)["JobState"] == "COMPLETED", job.says()
    tasks = sorted(tasks_of(job), key=lambda task: int(task["rank"]))
    if recipe.stem == "bench":  # two programs, one after the other
        assert tasks[::2] == tasks[1::2]
        tasks = tasks[::2]
    assert [int(task["rank"]) for task in tasks] == list(range(nodes * per_node))
    for rank, task in enumerate(tasks):
        # Neighbours, which tensor parallelism takes as peers, share a node.
        assert (task["node"], int(task["local_rank"])) == (
            tasks[rank - rank % per_node]["node"],
            rank % per_node,
        )
        assert int(task["size"]) == nodes * per_node
        assert task["head"] == tasks[0]["node"]
        assert task["nccl"] == task["gloo"] == "eth0"
    if "--gpus-per-node" in recipe.read_text():
        gpus = int(sbatch_option(recipe, "gpus-per-node"))
        assert {task["devices"] for task in tasks} == {",".join(map(str, range(gpus)))}


def test_a_row_of_a_table_pretrains_on_all_ranks_and_fine_tunes_on_one_node(
    cluster, submit, stand_in, tmp_path
):
    for name in ("squad1", "MNLI"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
    asked = {"TASKS": str(tmp_path / "tasks"), "ONLY": "squad1 MNLI", "ROWS": "nsp"}
    asked |= {"OUT": str(tmp_path / "out"), **stand_in}
    job = submit("ablations/paper", "table5", sbatch=("--nodes=2",), **asked)
    assert cluster.wait_until_ended(job.number)["JobState"] == "COMPLETED", job.says()
    steps = job.says().split(", meeting at")[1:]
    assert [step.count("\ntask ") for step in steps] == [16, 8, 8, 2]  # the table comes last
    out = tmp_path / "out" / "nsp"
    assert {path.name for path in out.iterdir()} == {"run", "squad1", "mnli"}


@pytest.fixture
def build(submit, data, text_file, tmp_path):
    """Submit the recipe that builds the shards of `data` again."""
    given = {
        "TEXT": str(text_file),
        "VOCAB": str(data.parent / "vocab" / "spiece.model"),
        "DATA": str(tmp_path / "shards"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",  # a test's cluster has no other user
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    flags = "--sequence-length", "64", "--holdout", "0.05"
    return lambda *first, sbatch: submit("shards", *first, *flags, sbatch=sbatch, **given)


def check_same_shards(folder: Path, expected: Path) -> None:
    built = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    assert {name for name in built if name.endswith(".tar")}
    for name, content in built.items():
        assert content == (expected / name).read_bytes(), name


@pytest.mark.parametrize("nodes", [1, 2])
def test_shards_of_many_are_those_of_one_process(nodes, cluster, build, data, tmp_path):
    """Without MPI on one node, by mpirun on two."""
    job = build(sbatch=(f"--nodes={nodes}", "--ntasks-per-node=2"))
    assert cluster.wait_until_ended(job.number)["JobState"] == "COMPLETED", job.says()
    check_same_shards(tmp_path / "shards", data)


def test_shards_of_an_array_are_those_of_one_process(cluster, build, data, tmp_path):
    """Three tasks at a time, of which one is requeued; then two, and one that ends the build."""
    work = tmp_path / "shards" / "building"

    def run_array(tasks: int, *first: str) -> int:
        job = build(*first, sbatch=(f"--array=1-{tasks}", "--ntasks-per-node=1"))
        for i in range(1, tasks + 1):
            ended = cluster.wait_until_ended(f"{job.number}_{i}")
            assert ended["JobState"] == "COMPLETED", job.says()
        return job.number

    pieces = run_array(3)
    assert {path.name for path in work.glob("piece-*.lock")} == {
        f"piece-{i}-of-3.lock" for i in (1, 2, 3)
    }
    cluster.run("scontrol", "requeue", f"{pieces}_2")
    again = cluster.wait_until_ended(f"{pieces}_2")
    assert (again["JobState"], again["Restarts"]) == ("COMPLETED", "1")
    run_array(2, "--join")
    assert {path.name for path in work.glob("join-*.lock")} == {
        f"join-{i}-of-2.lock" for i in (1, 2)
    }
    last = build("--join", sbatch=("--ntasks-per-node=1",))
    assert cluster.wait_until_ended(last.number)["JobState"] == "COMPLETED", last.says()
    check_same_shards(tmp_path / "shards", data)


def test_shards_are_copied_once_a_node_and_read_there(cluster, submit, data):
    """The path is another folder on each node."""
    job = submit("smoke", DATA=str(data), STAGE="/run/disk")
    assert cluster.wait_until_ended(job.number)["JobState"] == "COMPLETED", job.says()
    config = json.loads((job.output / "config.json").read_text())
    assert config["data"] == [f"/run/disk/{job.number}"]


@pytest.mark.parametrize("place", ["DATA", "STAGE"])
def test_shards_that_cannot_be_copied_end_the_job_in_one_line(
    place, cluster, submit, stand_in, data, tmp_path
):
    (tmp_path / "file").touch()
    asked = {"DATA": str(data), "STAGE": str(tmp_path / "stage"), place: str(tmp_path / "file")}
    job = submit("smoke", **stand_in, **asked)
    ended = cluster.wait_until_ended(job.number)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0")
    said = f"slurm: STAGE={asked['STAGE']}: {asked['DATA']} was not copied there\n"
    assert said in job.says() and not job.output.exists()


def test_gpus_may_be_given_per_task(cluster, submit, stand_in):
    flags = ("--gpus-per-node=0", "--gpus-per-task=1", "--ntasks-per-node=4")
    job = submit("large", sbatch=flags, **stand_in)
    assert cluster.wait_until_ended(job.number)["JobState"] == "COMPLETED", job.says()
    seen = sorted((task["node"], task["devices"]) for task in tasks_of(job))
    assert len(seen) == 8 and len(set(seen)) == 8, "two tasks of a node see the same device"


def test_nodes_that_are_loopback_to_themselves_need_an_interface(cluster, submit, stand_in):
    job = submit("smoke", SITE_ENV="/dev/null", **stand_in)
    ended = cluster.wait_until_ended(job.number)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0")
    assert "slurm: INTERFACE is not set, and n" in job.says()


def test_a_sites_constraint_memory_and_binding(cluster, submit, stand_in, tmp_path):
    """The lines of site.env.example: sbatch reads the first two, srun of the job the others."""
    site = tmp_path / "bound.env"
    site.write_text(
        "INTERFACE=eth0\nexport SLURM_CPU_BIND=verbose,rank_ldom SLURM_MEM_BIND=local "
        "NCCL_IB_HCA=mlx5_0 NCCL_IB_GID_INDEX=3 FI_PROVIDER=efa\n"
    )
    script = STAND_IN + 'env | grep -E "^(NCCL_IB|FI_|SLURM_(CPU|MEM)_BIND=)" | sort'
    write_scripts(tmp_path, python=script.replace("exit 0\n", ""))
    asked = {"SBATCH_CONSTRAINT": "fast", "SBATCH_MEM_PER_NODE": "4G", "SITE_ENV": str(site)}
    job = submit("smoke", **stand_in, **asked)
    ended = cluster.wait_until_ended(job.number)
    assert ended["JobState"] == "COMPLETED", job.says()
    assert ended["Features"] == "fast" and ended["MinMemoryNode"] == "4G"
    ranks = int(sbatch_option(ROOT / "slurm/smoke.sh", "ntasks-per-node"))
    ranks *= int(sbatch_option(ROOT / "slurm/smoke.sh", "nodes"))
    for line in ("NCCL_IB_HCA=mlx5_0", "NCCL_IB_GID_INDEX=3", "FI_PROVIDER=efa"):
        assert job.says().count(line + "\n") == ranks, line
    assert "SLURM_MEM_BIND=" in job.says() and "rank_ldom" in job.says().lower()


def test_variables_reach_the_ranks_of_a_job_that_was_given_only_some(cluster, submit, stand_in):
    given = "PATH,OUTPUT,DATA,PYTHON,SITE_ENV"
    job = submit("smoke", sbatch=(f"--export={given}",), **stand_in)
    assert cluster.wait_until_ended(job.number)["JobState"] == "COMPLETED", job.says()
    nodes = {task["rank"]: task["node"] for task in tasks_of(job)}
    assert {task["head"] for task in tasks_of(job)} == {nodes["0"]}


def test_a_job_that_a_task_of_an_array_submits_is_none_of_it(cluster, submit, stand_in):
    outer = {"SLURM_ARRAY_JOB_ID": "99", "SLURM_ARRAY_TASK_ID": "3"}
    job = submit("smoke", **stand_in, **outer)
    assert cluster.wait_until_ended(job.number)["JobState"] == "COMPLETED", job.says()
    assert [path.name for path in job.output.iterdir()] == ["exit.json"]  # no seed-3


def test_a_container_is_asked_for_where_the_site_names_one(cluster, submit, stand_in, tmp_path):
    # pyxis is not installed here: an srun before the real one in PATH records its arguments.
    real = cluster.run("sh", "-c", "command -v srun")
    asked = tmp_path / "asked"
    srun = (
        f'printf "%s\\n" "$@" > {asked}\n'
        'for word in "$@"; do [[ $word = --container-* ]] || kept+=("$word"); done\n'
        f'exec {real} "${{kept[@]}}"'
    )
    path = write_scripts(tmp_path, srun=srun)["PATH"]
    environ = {
        **stand_in,
        "PATH": f"{path}:/usr/sbin",
        "CONTAINER_IMAGE": "/images/albert.sqsh",
        "CONTAINER_MOUNTS": "/data",
    }
    job = submit("smoke", **environ)
    assert cluster.wait_until_ended(job.number)["JobState"] == "COMPLETED", job.says()
    words = asked.read_text().splitlines()
    assert "--container-image=/images/albert.sqsh" in words
    assert f"--container-mounts={ROOT},/data,{job.output}" in words
    assert f"--container-workdir={ROOT}" in words
