"""Every ablation recipe, at both scales, asks for what the trainers take, and prints its table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from albert_ds.config import read_config
from albert_ds.finetuning.config import build_parser
from tests.conftest import ROOT
from tools.probe import build_parser as build_probe_parser

OTHERS = ("common.sh", "sharing.sh")  # tests/test_sharing_study.py
RECIPES = sorted(p for p in (ROOT / "slurm" / "ablations").glob("*.sh") if p.name not in OTHERS)
# Rows of the paper's tables.
ROWS = {
    "table2": 6,
    "table3": 8,
    "table4": 8,
    "table5": 3,
    "table6": 2,
    "table7": 2,
    "table8": 2,
    "depth": 6,
    "width": 4,
    "deeper": 2,
}
# Stands in for Python: notes what it was asked to run, makes the folder, runs the table alone.
STUB = """#!/bin/bash
printf '%s\\n' "$#" "$@" >> "$ASKED"
while [ $# -gt 0 ]; do [ "$1" = --output ] && mkdir -p "$(dirname "$2")"; shift; done
"""


def run_recipe(recipe: Path, scale: str, data: Path, tmp_path: Path) -> list[list[str]]:
    """The command lines that a recipe asks for."""
    stub, asked, tasks = tmp_path / "python", tmp_path / "asked", tmp_path / "tasks"
    stub.write_text(STUB)
    stub.chmod(0o755)
    for name in ("squad1", "squad2", "MNLI", "SST-2", "RACE"):
        (tasks / name).mkdir(parents=True)
    names = {"PYTHON": stub, "ASKED": asked, "TASKS": tasks, "DATA": data, "EXTRA": data}
    environ = {**os.environ, "SCALE": scale, "OUT": str(tmp_path / "out")}
    environ |= {name: str(path) for name, path in names.items()}
    done = subprocess.run(["bash", recipe], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    words, commands = asked.read_text().splitlines(), []
    while words:
        count = int(words.pop(0))
        commands.append(words[:count])
        del words[:count]
    return commands


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
@pytest.mark.parametrize("scale", ["tiny", "paper"])
def test_a_recipe_asks_for_what_there_is(recipe, scale, data, tmp_path):
    commands = run_recipe(recipe, scale, data, tmp_path)
    models, judged = [], 0
    for script, *argv in commands:
        if script == "albert_ds/train.py":
            if "--init-from" in argv:  # the stub has made no run there
                at = argv.index("--init-from")
                del argv[at : at + 2]
            models.append(read_config(argv, world_size=1).model)
        elif script == "albert_ds/finetune.py":
            build_parser().parse_args(argv)
            judged += 1
        elif script == "tools/probe.py":
            build_probe_parser().parse_args(argv)
    assert len(models) == ROWS[recipe.stem] and judged == 5 * len(models)
    if scale == "paper":
        assert max(model.hidden_size for model in models) >= 768
    assert commands[-1][0] == "tools/lab/paper_table.py"
    assert sum("=" in word for word in commands[-1]) == len(models)


def test_every_table_has_a_recipe():
    assert {recipe.stem for recipe in RECIPES} == ROWS.keys()


def write_results(folder: Path, task: str, dev: dict) -> None:
    path = folder / task.rpartition("/")[2] / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"task": task, "dev": dev}))


def test_the_table_averages_as_the_paper_does(tmp_path):
    """ALBERT-large of Table 2: 90.6/83.9, 82.3/79.4, 83.5, 91.7, 68.5, Avg 82.4."""
    base = tmp_path / "large"
    write_results(base, "squad1", {"exact": 83.9, "f1": 90.6})
    write_results(base, "squad2", {"exact": 79.4, "f1": 82.3, "threshold": 0.1})
    seeds = {"median": 0.835, "mean": 0.8, "std": 0.01, "values": [0.79, 0.835]}
    write_results(base, "glue/mnli", {"accuracy": seeds, "accuracy_mm": seeds})
    write_results(base, "glue/sst2", {"accuracy": 0.917})
    write_results(base, "race", {"accuracy": 0.685, "accuracy_high": 0.6})
    write_results(tmp_path / "part", "race", {"accuracy": 0.5})
    command = [sys.executable, "tools/lab/paper_table.py", "--rows"]
    command += [f"ALBERT large={base}", f"part={tmp_path / 'part'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
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
    timed = [*command, "--time", "--speedup-over", "ALBERT large", "--heldout"]
    lines = subprocess.run(timed, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].startswith("| | Steps | Hours | Speedup | MLM loss | SQuAD1.1 |")
    assert lines[2].startswith("| ALBERT large | 300 | 0.417 | 1.0x | 1.500 | 90.6/83.9 |")
    assert lines[3].startswith("| part | 100 | 0.0556 | 2.5x | 1.500 | - |")
    done = subprocess.run([*command, "--spread"], cwd=ROOT, capture_output=True, text=True)
    assert "80.0 +- 1.0" in done.stdout
    done = subprocess.run([*command[:3], "x=none"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--rows x=none: must be NAME=DIR" in done.stderr
