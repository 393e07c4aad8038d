"""Every ablation recipe, at both scales, asks for what the trainers take, and prints its table."""

import json
from pathlib import Path

import pytest

from albert_ds.base.errors import UserError
from albert_ds.commands.probe import build_parser as build_probe_parser
from albert_ds.settings.finetune import build_parser
from albert_ds.settings.pretrain import read_config
from tests.command import ROOT, write_scripts
from tests.recipes import ask_recipe, start_recipe
from tools.lab import paper_table

SCRIPTS = ROOT / "slurm" / "ablations"
OTHERS = ("common.sh", "paper.sh", "sharing.sh", "recipe.sh")  # the last two: test_sharing_study.py
RECIPES = sorted(p for p in SCRIPTS.glob("*.sh") if p.name not in OTHERS)
FOLDERS = ("squad1", "squad2", "MNLI", "SST-2", "RACE")
# Rows of the paper's tables.
ROWS = dict(table2=6, table3=8, table4=8, table5=3, table6=2, table7=2, table8=2)
ROWS |= dict(depth=6, width=4, deeper=2)


@pytest.fixture
def given(tmp_path) -> dict:
    """The variables that every row needs."""
    for name in FOLDERS:
        (tmp_path / "tasks" / name).mkdir(parents=True)
    return {"DATA": "unused", "EXTRA": "unused", "TASKS": tmp_path / "tasks"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
@pytest.mark.parametrize("scale", ["tiny", "paper"])
def test_a_recipe_asks_for_what_there_is(recipe, scale, data, given, tmp_path):
    commands = ask_recipe(
        recipe, tmp_path, **{**given, "SCALE": scale, "DATA": data, "EXTRA": data}
    )
    configs = []
    judged = 0
    for command, *argv in commands:
        if command == "train":
            if "--init-from" in argv:  # the stub has made no run there
                at = argv.index("--init-from")
                del argv[at : at + 2]
            configs.append(read_config(argv, world_size=1)[0])
        elif command == "finetune":
            build_parser().parse_args(argv)
            judged += 1
        elif command == "probe":
            build_probe_parser().parse_args(argv)
    assert len(configs) == ROWS[recipe.stem] and judged == 5 * len(configs)
    # A limit of time would end the schedule of the learning rate early.
    assert {config.max_hours for config in configs} == {None}
    if scale == "paper":
        assert max(config.model.hidden_size for config in configs) >= 768
        steps = [400_000, 125_000] if recipe.stem == "table6" else [125_000] * len(configs)
        assert [config.steps for config in configs] == steps
    assert commands[-1][0] == "tools/lab/paper_table.py"
    assert sum("=" in word for word in commands[-1]) == len(configs)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"DATA": None}, "DATA is not set"),
        ({"TASKS": ROOT}, "squad1 is missing; ONLY='squad1 ...' takes only some"),
        ({"ONLY": "squad1 MLNI"}, "ONLY: MLNI is none of squad1 squad2 MNLI"),
        ({"ROWS": "all-127"}, "ROWS: all-127 is none of all-128 "),
        ({"SCALE": "Paper"}, "SCALE=Paper: must be tiny or paper"),
        ({"SCALE": "paper", "SLURM_JOB_ID": None}, "sbatch slurm/ablations/paper.sh table4"),
    ],
)
def test_a_wrong_setting_is_one_line_and_nothing_runs(environ, message, given, tmp_path):
    done = start_recipe(SCRIPTS / "table4.sh", tmp_path, **{**given, **environ})
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ((), {}, "no table: must be the name of a script in slurm/ablations"),
        (("table4", "--seed", "3"), {}, "--seed: a table takes no flags"),
        (("sharing", "--seed", "3"), {}, "--seed: the study takes no flags"),
        (("sharing",), {"SLURM_ARRAY_TASK_ID": 1, "SLURM_ARRAY_JOB_ID": 1}, "use ROWS"),
    ],
)
def test_a_wrong_submission_is_one_line_and_nothing_runs(argv, environ, message, given, tmp_path):
    done = start_recipe(SCRIPTS / "paper.sh", tmp_path, *argv, **{**given, **environ})
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("recipe", "row", "other_run"),
    [("table2", "albert-base", "bert-large/run"), ("sharing", "all+norm", "all/seed-2")],
)
def test_a_row_that_another_job_trains_is_not_in_the_table(recipe, row, other_run, given, tmp_path):
    (tmp_path / "out" / other_run).mkdir(parents=True)
    settings = {**given, "SCALE": "paper", "ROWS": row, "SEEDS": 2}
    *_, table = ask_recipe(SCRIPTS / f"{recipe}.sh", tmp_path, **settings)
    out = tmp_path / "out"
    assert table[1:] == ["--rows", f"{row}={out / row}", "--output", str(out / "table.json")]


# A program on its way: the time limit comes near. Fine-tuning ends well in the time that is left.
LIMIT = """while [ "$1" != "$PYTHON" ]; do shift; done
if [[ " $* " = *" $AT "* ]]; then
    [ "$AT" = probe ] || trap '' USR1
    has_trap() { (( 0x$(sed -n 's/^SigCgt:[[:space:]]*//p' /proc/$PPID/status) >> 9 & 1 )); }
    until has_trap; do :; done
    kill -USR1 $PPID
    while [ "$AT" = probe ]; do :; done
fi
exec "$@\""""


@pytest.mark.parametrize("at", ["squad1", "probe"])
def test_near_the_time_limit_a_table_starts_nothing_more_and_is_requeued(at, given, tmp_path):
    """A fine-tuning that ends with 0 just then, and a program that the signal kills."""
    path = write_scripts(
        tmp_path / "first",
        srun=LIMIT,
        scontrol='[ "$1" = requeue ] && echo "requeued $2" || echo node1',
        sleep="exit 0",  # Slurm would end the script
    )
    settings = {**given, **path, "AT": at, "SCALE": "paper", "SLURM_RESTART_COUNT": "0"}
    settings |= {"ROWS": "nsp", "ONLY": "squad1 RACE" if at == "squad1" else "squad1"}
    done = start_recipe(SCRIPTS / "table5.sh", tmp_path, **settings)
    assert done.returncode == 75 and "\nrequeued 1\n" in done.stdout, done.stdout + done.stderr
    words = (tmp_path / "asked").read_text().split()
    assert words.count("train") == 1 and words.count("finetune") == 1 and "race" not in words


def test_a_site_file_may_end_in_a_test(given, tmp_path):
    (tmp_path / "site.env").write_text("[ -d /none ] && STAGE=/none")
    settings = {**given, "ROWS": "nsp", "SCALE": "paper", "SITE_ENV": tmp_path / "site.env"}
    assert ask_recipe(SCRIPTS / "table5.sh", tmp_path, **settings)


def test_only_some_tasks_and_equal_time_on_other_hardware(given, tmp_path):
    asked = {
        **given,
        "ONLY": "RACE squad2",
        "ROWS": "bert-large",
        "STEPS_BERT": 77,
        "SCALE": "paper",
    }
    train, *tasks, _ = ask_recipe(SCRIPTS / "table6.sh", tmp_path, **asked)
    assert train[len(train) - train[::-1].index("--steps")] == "77"
    assert [task[task.index("--task") + 1] for task in tasks] == ["race", "squad2"]


def test_every_table_has_a_recipe():
    assert {recipe.stem for recipe in RECIPES} == ROWS.keys()


def write_results(folder: Path, task: str, dev: dict) -> None:
    path = folder / task.rpartition("/")[2] / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"task": task, "dev": dev}))


def test_the_table_averages_as_the_paper_does(tmp_path, capsys):
    """ALBERT-large of Table 2: 90.6/83.9, 82.3/79.4, 83.5, 91.7, 68.5, Avg 82.4."""
    base = tmp_path / "large"
    write_results(base, "squad1", {"exact": 83.9, "f1": 90.6})
    write_results(base, "squad2", {"exact": 79.4, "f1": 82.3, "threshold": 0.1})
    seeds = {"median": 0.835, "mean": 0.8, "std": 0.01, "values": [0.79, 0.835]}
    write_results(base, "glue/mnli", {"accuracy": seeds, "accuracy_mm": seeds})
    write_results(base, "glue/sst2", {"accuracy": 0.917})
    write_results(base, "race", {"accuracy": 0.685, "accuracy_high": 0.6})
    write_results(tmp_path / "part", "race", {"accuracy": 0.5})
    rows = ["--rows", f"ALBERT large={base}", f"part={tmp_path / 'part'}"]
    paper_table.main(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| | SQuAD1.1 | SQuAD2.0 | MNLI | SST2 | RACE | Avg |"
    assert lines[2] == "| ALBERT large | 90.6/83.9 | 82.3/79.4 | 83.5 | 91.7 | 68.5 | 82.4 |"
    assert lines[3] == "| part | - | - | - | - | 50.0 | 50.0* |"
    for folder, seconds, speed in (
        (base, (9.0, 3.0, 3.0), 20.0),
        (tmp_path / "part", (2.0,), 50.0),
    ):
        records = [
            {"step": 100 * n, "step_seconds": s, "samples_per_second": speed}
            for n, s in enumerate(seconds, start=1)
        ]
        heldout = {"step": 100 * len(seconds), "heldout_mlm_loss": 1.5}
        (folder / "run").mkdir()
        lines = [json.dumps(record) for record in [*records, heldout]]
        (folder / "run" / "metrics.jsonl").write_text("\n".join(lines))
    paper_table.main([*rows, "--time", "--speedup-over", "ALBERT large", "--heldout"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| | Steps | Hours | Speedup | MLM loss | SQuAD1.1 |")
    assert lines[2].startswith("| ALBERT large | 300 | 0.417 | 1.0x | 1.500 | 90.6/83.9 |")
    assert lines[3].startswith("| part | 100 | 0.0556 | 2.5x | 1.500 | - |")
    with pytest.raises(UserError, match="--rows x=none: must be NAME=DIR"):
        paper_table.main(["--rows", "x=none"])
