"""Every Slurm recipe is sound bash, its header is right, and the trainer accepts its command."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from albert_ds.engine.deepspeed_config import read_ds_config
from albert_ds.model.config import SIZES
from albert_ds.model.shapes import count_params
from albert_ds.settings.pretrain import read_config
from tests.command import ROOT, run_bash, run_program, write_scripts
from tests.recipes import JOB, ask_recipe

RECIPES = sorted(path for path in (ROOT / "slurm").glob("*.sh") if path.name != "common.sh")
PAPER = {size: f"albert-{size}" for size in ("base", "large", "xlarge", "xxlarge")}
PAPER["bert_large"] = "bert-large"
BUILD = {"TEXT": "text/*", "VOCAB": "spiece.model"}
TWO = {"SLURM_JOB_NUM_NODES": "2"}
FIRST = {**JOB, "SLURM_RESTART_COUNT": None}
ARRAY = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"}


def sbatch_option(recipe, name: str) -> str:
    return re.search(rf"^#SBATCH --{name}=(\S+)", recipe.read_text(), re.M)[1]


def count_ranks(recipe) -> int:
    return int(sbatch_option(recipe, "nodes")) * int(sbatch_option(recipe, "ntasks-per-node"))


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sh")), ids=lambda p: p.name)
def test_bash_accepts_it(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipe_is_short_and_its_header_says_it_all(recipe):
    text = recipe.read_text()
    assert text.count("\n") <= 30
    for word in ("Command:", "Hardware:", "Time:", "Expected:"):
        assert f"# {word}" in text, f"the header does not state {word}"
    nodes, tasks = sbatch_option(recipe, "nodes"), sbatch_option(recipe, "ntasks-per-node")
    assert re.search(rf"# Hardware: {nodes} nodes? x {tasks} ", text)
    if "--requeue" in text:  # what was printed before must stay, and there must be time to save
        assert "--open-mode=append" in text and "--signal=B:USR1@" in text


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_submitted_in_another_folder_it_is_one_line_and_code_2(recipe, tmp_path):
    done = run_program("bash", recipe, cwd=tmp_path, SLURM_SUBMIT_DIR=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{tmp_path}/slurm/common.sh: No such file" in done.stderr


def ask(recipe, data, folder, *argv: str) -> dict[str, list[str]]:
    """Command -> flags that the recipe runs."""
    places = {"DATA": data, "OUTPUT": folder / "run", "REPORT": folder / "report"}
    return {name: flags for name, *flags in ask_recipe(recipe, folder, *argv, **places)}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_recipe(name, data, tmp_path):
    """Its settings are the paper's; layout and hours are those that the planner computes."""
    from albert_lab.commands import scaling_model
    from albert_lab.scaling.planner import find_hours

    recipe = ROOT / "slurm" / f"{name}.sh"
    # The test's shards hold shorter sequences than the recipe asks for.
    asked = ask(recipe, data, tmp_path, "--sequence-length", "64")["train"]
    assert asked.index("512") == asked.index("--sequence-length") + 1
    config = read_config(asked, world_size=count_ranks(recipe))[0]
    assert config.size == PAPER[name] and config.stream.objective == "sop"
    assert (config.batch_size, config.learning_rate) == (4096, 0.00176)
    assert (config.steps, config.warmup_steps) == (
        400_000 if name == "bert_large" else 125_000,
        3125,
    )
    assert config.model.dropout == (0 if name == "xxlarge" else 0.1)
    assert config.deepspeed["optimizer"]["type"] == "Lamb"
    assert config.deepspeed["zero_optimization"]["stage"] == 1

    text = recipe.read_text()
    typed = re.search(r"^# Plan: +albert-ds (plan .*)$", text, re.M)[1].split()
    args = scaling_model.build_parser().parse_args(typed)
    best = scaling_model.choose_plans(args)[0][0]

    assert str(args.sequence_length) == asked[asked.index("--sequence-length") + 1]
    assert (args.model, args.gpus) == (config.size, count_ranks(recipe))
    assert (args.steps, args.batch_size) == (config.steps, config.batch_size)
    ds_config = config.deepspeed
    layout = best.layout
    assert ds_config["gradient_accumulation_steps"] == layout.accumulation
    assert config.micro_batch_size == layout.micro_batch_size
    assert config.activation_checkpointing == layout.activation_checkpointing
    assert config.tensor_parallel == layout.tensor_parallel
    assert ds_config["zero_optimization"]["stage"] == layout.zero and ds_config["bf16"]["enabled"]
    assert layout.nodes == int(sbatch_option(recipe, "nodes"))

    def hours(link: float, steps: int = args.steps) -> str:
        """With the recipe's micro-batch."""
        args.link = link
        args.micro_batch_size = layout.micro_batch_size
        (plan, *_), machine, _ = scaling_model.choose_plans(args)
        return f"{find_hours(plan, machine, link=link * 1e9, steps=steps):,.1f}"

    (plan, *_), machine, _ = scaling_model.choose_plans(args)
    exact = find_hours(plan, machine, link=args.link * 1e9, steps=args.steps)
    gpu_hours = f"{exact * args.gpus:,.0f} GPU-hours"
    assert f"PREDICTED for H100, not measured: {hours(100)} h, {gpu_hours} " in text
    if layout.nodes == 1:
        assert "on one node" in text and hours(25) == hours(400)
    else:
        match = re.search(
            r"with 100 Gb/s a node\n# +\(([\d.]+) h with 25, ([\d.]+) h with 400\)", text
        )
        assert match.groups() == (hours(25), hours(400))
    parameters = sum(count_params(SIZES[PAPER[name]]).values())
    assert f"{4 * parameters / 1e6:.0f} MB of fp32 gradients" in text
    assert f"{2 * parameters / 1e6:.0f} MB of bf16 weights" in text
    if name == "bert_large":
        assert f"--steps 125000, {hours(100, 125_000)} h" in text
    if name == "large":
        times = re.search(r"10 Gbit/s\n# network carries that ([\d.]+) times a second", text)[1]
        assert times == f"{10e9 / 8 / best.step.link_bytes:.1f}"


def test_smoke_recipe(data, tmp_path):
    recipe = ROOT / "slurm" / "smoke.sh"
    asked = ask(recipe, data, tmp_path)["train"]
    config = read_config(asked, world_size=count_ranks(recipe))[0]
    assert config.size == "albert-tiny" and count_ranks(recipe) == 4


def test_shards_recipe_needs_no_mpi_on_one_node(tmp_path):
    recipe = ROOT / "slurm" / "shards.sh"
    asked = ask_recipe(recipe, tmp_path, "--language", "ko", **BUILD, DATA="shards")
    flags = ["--input", "text/*", "--vocab", "spiece.model", "--output", "shards"]
    assert asked == [["shards", *flags, "--language", "ko", "--processes", "2"]]


def test_shards_that_a_container_builds_outlive_it(tmp_path):
    given = {**JOB, **BUILD, "DATA": f"{tmp_path}/new/shards", "MPI": "pmix"}
    said = start_with("shards", tmp_path, "CONTAINER_IMAGE=/images/a.sif", **given).stdout
    assert f" --bind {ROOT},{given['DATA']} /images/a.sif " in said and Path(given["DATA"]).is_dir()


def test_bench_recipe(tmp_path):
    from albert_lab.commands import comm_volume, throughput_bench

    programs = ask(ROOT / "slurm" / "bench.sh", "unused", tmp_path)
    assert list(programs) == ["bench", "traffic"]
    for tool, asked in zip((throughput_bench, comm_volume), programs.values(), strict=True):
        args = tool.build_parser().parse_args(asked)
        assert args.output.parent == tmp_path / "report" and args.models[0] == "bert-large"


def test_check_recipe(tmp_path):
    recipe = ROOT / "slurm" / "check.sh"
    asked = ask(recipe, "unused", tmp_path, "--piece", "versions")
    report = str(tmp_path / "report")
    assert asked == {"gpu-check": ["--minutes", "60", "--output", report, "--piece", "versions"]}


def start_with(name: str, folder, site: str, *argv: str, **environ: str):
    """Run a recipe with a site file and an srun that prints its command."""
    (folder / "site.env").write_text(site)
    programs = {"srun": 'echo "$@"', "scontrol": "echo node1", "python-of-it": "exit 0"}
    path = write_scripts(folder / "bin", **programs)
    nothing = dict.fromkeys(os.environ)
    given = {**nothing, **path, "SITE_ENV": folder / "site.env", **environ}
    return run_bash(f"slurm/{name}.sh", *argv, **given)


def test_the_environment_wins_over_the_site_file(tmp_path):
    site = f"DATA=of-the-site\nRUNS={tmp_path}\nPYTHON=python-of-it\n"
    site += "STAGE=$SLURM_TMPDIR/shards\n"  # a disk of the nodes
    done = start_with("smoke", tmp_path, site, DATA="typed", SLURM_TMPDIR="/job-1", **JOB)
    assert done.stdout.count(" typed /job-1/shards/1\n") == 1  # copied from, to
    assert "--data /job-1/shards/1 " in done.stdout and " python-of-it -u -m" in done.stdout
    assert f"--output {tmp_path}/albert-smoke " in done.stdout


def test_a_busy_controller_is_asked_again_to_requeue(tmp_path):
    requeue = """[ "$1" = requeue ] || { echo node1; exit 0; }
    echo "$2" >> "$OUTPUT/asked"
    [ "$(wc -l < "$OUTPUT/asked")" = 3 ] || { echo "Socket timed out" >&2; exit 1; }
    kill $PPID  # as Slurm ends the script"""
    stopped = """echo '{"code": 75}' > "$OUTPUT/exit.json\""""
    path = write_scripts(tmp_path / "first", srun=stopped, scontrol=requeue, sleep="exit 0")
    job = {**JOB, "SLURM_RESTART_COUNT": "0", "SITE_ENV": "/dev/null", "DATA": "data", **path}
    done = run_bash("slurm/smoke.sh", **job, OUTPUT=tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stdout + done.stderr
    assert (tmp_path / "asked").read_text() == "1\n" * 3


@pytest.mark.parametrize(("restarts", "code"), [("0", 2), ("1", -signal.SIGTERM)])
def test_a_storage_that_is_gone_at_a_restart_gets_time(restarts, code, tmp_path):
    (tmp_path / "gone").touch()
    requeue = '[ "$1" != requeue ] || { echo requeued; kill $PPID; }; echo node1'
    path = write_scripts(tmp_path / "first", srun="echo started", scontrol=requeue, sleep="exit 0")
    job = {**JOB, "SLURM_RESTART_COUNT": restarts, "SITE_ENV": "/dev/null", "DATA": "data", **path}
    done = run_bash("slurm/smoke.sh", **job, OUTPUT=tmp_path / "gone/run")
    assert done.returncode == code and "Not a directory" in done.stderr, done
    assert ("requeued" in done.stdout) == (restarts == "1") and "started" not in done.stdout


def test_a_job_submitted_inside_another_is_not_bound_to_its_cores(tmp_path):
    outer = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1"}
    outer |= {"SLURM_STEP_ID": "0", **JOB}
    path = write_scripts(tmp_path / "first", srun="env", scontrol="echo node1")
    for site in ("", "export SLURM_CPU_BIND=cores\n"):
        (tmp_path / "site.env").write_text(f"DATA=data\nRUNS={tmp_path}\n{site}")
        done = run_bash("slurm/smoke.sh", **outer, **path, SITE_ENV=tmp_path / "site.env")
        given = re.findall("^SLURM_(?:CPU_BIND|STEP_ID).*$", done.stdout, re.M)
        assert given == [site.removeprefix("export ").strip()] * bool(site), done.stdout


@pytest.mark.parametrize(
    ("name", "site", "environ", "message"),
    [
        ("smoke", "DATA=data", {}, "not a Slurm job: submit it with sbatch slurm/smoke.sh"),
        (
            "smoke",
            "",
            {**JOB, "SLURM_NTASKS": None},
            "this job has no tasks: sbatch slurm/smoke.sh",
        ),
        ("smoke", "", {**JOB, "SITE_ENV": "gone.env"}, "SITE_ENV=gone.env: no such file"),
        ("smoke", "", JOB, "DATA is not set"),
        ("smoke", "DATA=data\nOUTPUT=run", JOB, "sets OUTPUT, which belongs to one run"),
        ("smoke", "DATA=data\nMAX_RESTARTS=none", JOB, "MAX_RESTARTS=none: must be a whole number"),
        ("smoke", "DATA=data\nMAX_WAIT=1m", JOB, "MAX_WAIT=1m: must be a whole number"),
        ("smoke", "DATA=data\nif true", JOB, "site.env: line 3: syntax error"),
        ("finetune", "", JOB, "TASK is not set"),
        ("finetune", "", {**JOB, "TASK": "race", "TASK_DATA": "race"}, "CHECKPOINT is not set"),
        ("shards", "DATA=data", JOB, "TEXT is not set"),
        ("shards", "DATA=data", {**JOB, "TEXT": "text/*"}, "VOCAB is not set"),
        ("shards", "DATA=d CONTAINER_IMAGE=a", {**JOB, **BUILD}, "MPI is not set: an entry"),
        ("shards", "DATA=d PYTHON=python-of-it", {**JOB, **BUILD, **TWO}, "/bin/mpirun"),
        (
            "smoke",
            "DATA=data PYTHON=false",
            FIRST,
            "PYTHON=false: must be an interpreter for which",
        ),
    ],
)
def test_a_missing_setting_is_one_line_and_code_2(name, site, environ, message, tmp_path):
    done = start_with(name, tmp_path, site, **environ)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_each_task_of_an_array_takes_a_combination_of_the_grid(tmp_path):
    grid = "--learning-rate 1e-3 2e-3 --sharing all pattern:0,1/0,0 --seed 7"
    runs = []
    for task in range(4):
        environ = {**JOB, **ARRAY, "SLURM_ARRAY_TASK_ID": str(task), "RUNS": str(tmp_path)}
        (tmp_path / str(task)).mkdir()
        done = start_with("base", tmp_path / str(task), "DATA=data", GRID=grid, **environ)
        (line,) = [line for line in done.stdout.splitlines() if " --output " in line]
        words = line.split()
        folder = words[words.index("--output") + 1].removeprefix(f"{tmp_path}/albert-base/")
        runs.append((folder, words[-6:]))  # after the recipe's own, which they replace
    (tmp_path / "seeds").mkdir()
    environ = {**JOB, **ARRAY, "SLURM_ARRAY_TASK_ID": "5", "RUNS": str(tmp_path)}
    said = start_with("base", tmp_path / "seeds", "DATA=data", **environ).stdout
    assert f"--output {tmp_path}/albert-base/seed-5 " in said and "--seed 5\n" in said
    assert runs == [
        (
            f"learning-rate-{rate}_sharing-{sharing.replace('/', '-')}_seed-7",
            ["--learning-rate", rate, "--sharing", sharing, "--seed", "7"],
        )
        for sharing in ("all", "pattern:0,1/0,0")
        for rate in ("1e-3", "2e-3")
    ]


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (("--spares", "1"), {}, "--spares 1: must be 0 to 0, with one node more in sbatch --nodes"),
        (("--spares", "x"), {}, "--spares x: must be 0 to 0"),
        (("--spares",), {}, "--spares : must be 0 to 0"),
        (("--seed=4",), ARRAY, "--seed: a job array sets it"),
        (("--dropout", "0"), {**ARRAY, "GRID": "--seed 1 --dropout 0.1"}, "--dropout: a job array"),
        ((), {**ARRAY, "GRID": "--seed 3 4", "SLURM_ARRAY_TASK_ID": "2"}, "fewer combinations"),
        ((), {"GRID": "--seed 3 4"}, "GRID is for a job array"),
        ((), {**ARRAY, "GRID": "seed 3 4"}, "GRID=seed 3 4: must be"),
        ((), {**ARRAY, "GRID": "--seed 3 --dropout"}, "must be '--FLAG VALUE ...'"),
    ],
)
def test_a_wrong_flag_of_the_job_is_one_line_and_code_2(argv, environ, message, tmp_path):
    settings = {**JOB, **environ, "RUNS": str(tmp_path)}
    done = start_with("smoke", tmp_path, "DATA=data", *argv, **settings)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


APPTAINER = """echo "apptainer $*"
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@\""""


def test_apptainer_runs_the_command_of_each_rank(tmp_path):
    """srun starts apptainer, and that the trainer with its flags."""
    path = write_scripts(
        tmp_path / "bin",
        srun='while [[ $1 = --* ]]; do shift; done; exec "$@"',
        scontrol="echo node1",
        trainer='echo "trainer: $*"; echo \'{"code": 0}\' > "$OUTPUT/exit.json"',
        apptainer=APPTAINER,
    )
    settings = {"DATA": "/two words", "OUTPUT": str(tmp_path / "run"), "PYTHON": "trainer"}
    settings |= {"CONTAINER_IMAGE": "/images/a.sif", "CONTAINER_MOUNTS": "/shards,/runs"}
    environ = {**path, "SITE_ENV": "/dev/null", **settings, **JOB}
    done = run_bash("slurm/smoke.sh", "--seed", "7", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    asked, ran = re.findall("^(?:apptainer|trainer:) (.*)$", done.stdout, re.M)
    mounts = f"{ROOT},/shards,/runs,{tmp_path}/run"  # RUN, for it may be in neither
    options = f"exec --nv --pwd {ROOT} --bind {mounts} /images/a.sif trainer "
    assert asked == options + ran
    assert ran.startswith("-u ") and "--data /two words " in ran and ran.endswith(" --seed 7")


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_deepspeed_configs_are_accepted(path):
    config = read_ds_config(path)
    stage, precision, *_ = path.stem.removeprefix("zero").split("_")
    assert config["zero_optimization"]["stage"] == int(stage)
    enabled = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")]
    assert enabled == ([] if precision == "fp32" else [precision])
