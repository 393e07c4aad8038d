"""The study of sharing asks for what the trainer takes, resumes, and its table is arithmetic."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from albert_ds.model.shapes import count_params
from albert_ds.settings.pretrain import read_config
from tests.conftest import ROOT
from tools.lab.sharing_table import read_curve

RECIPE = ROOT / "slurm" / "ablations" / "sharing.sh"
SMALL_BUDGETS = ROOT / "slurm" / "ablations" / "recipe.sh"
STUB = """#!/bin/bash
printf '%s\\n' "$#" "$@" >> "$ASKED"
while [ $# -gt 0 ]; do [ "$1" = --output ] && mkdir -p "$(dirname "$2")"; shift; done
"""


def run_recipe(
    out: Path, data: Path, script: Path = RECIPE, **environ
) -> subprocess.CompletedProcess:
    given = {**os.environ, "DATA": str(data), "OUT": str(out), "PYTHON": sys.executable}
    given |= {"LENGTH": "64", **environ}
    return subprocess.run(["bash", script], env=given, capture_output=True, text=True, cwd=ROOT)


def test_every_row_is_a_run_and_equal_parameters_are_equal(data, tmp_path):
    stub, asked = tmp_path / "python", tmp_path / "asked"
    stub.write_text(STUB)
    stub.chmod(0o755)
    done = run_recipe(tmp_path / "out", data, PYTHON=str(stub), ASKED=str(asked), SEEDS="2")
    assert done.returncode == 0, done.stderr
    words, configs = asked.read_text().splitlines(), {}
    while words:
        count = int(words.pop(0))
        command, *argv = words[2:count] if words[0] == "-m" else words[:count]
        del words[:count]
        if command == "train":
            configs[argv[argv.index("--output") + 1]] = read_config(argv, world_size=1)
    names = {Path(folder).parent.name: config for folder, config in configs.items()}
    assert len(names) == 20 and len(configs) == 40
    assert {config.seed for config in configs.values()} == {1, 2}
    for blocks in (2, 3):
        patterns = (f"groups-{blocks}", f"cycle-{blocks}", f"cycle-rev-{blocks}")
        assert len({str(count_params(names[name].model)) for name in patterns}) == 1
        assert len({str(names[name].model.plan) for name in patterns}) == 3
    schedule = names["depth-2-3-6"]
    assert {schedule.model_at(step).num_layers for step in range(schedule.steps)} == {2, 3, 6}


def test_a_wrong_setting_is_one_line(data, tmp_path):
    for environ, words in (
        ({"DATA": ""}, "DATA is not set"),
        ({"SCALE": "Paper"}, "SCALE=Paper: must be tiny or paper"),
        ({"SCALE": "paper", "SLURM_JOB_ID": ""}, "is for a Slurm job"),
        ({"ROWS": "cycle-9", "PYTHON": "false"}, "ROWS: cycle-9 is none of groups-2 "),
    ):
        done = run_recipe(tmp_path, data, **environ)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_two_rows_of_three_steps_make_a_table_and_resume(data, tmp_path):
    given = {"STEPS": "3", "SEEDS": "1"}
    first, again = (
        run_recipe(tmp_path, data, **given, ROWS=rows)
        for rows in ("depth-2-3-6", "depth-2-3-6 cycle-2")
    )
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "resuming from" in again.stderr and "resuming from" not in first.stderr
    head, _, depth, cycle = again.stdout[again.stdout.index("| |") :].splitlines()[:4]
    assert head.startswith(
        "| | parameters | MFLOPs a token | tokens/s | gradient MB a step | layers"
    )
    assert depth.startswith("| depth-2-3-6 |") and cycle.startswith("| cycle-2 |")
    rows = json.loads((tmp_path / "table.json").read_text())
    curve = read_curve(tmp_path / "cycle-2" / "seed-1")
    assert rows["cycle-2"]["layers_a_step"] == [6.0]
    assert rows["cycle-2"]["loss"][0] == curve.losses[-1]
    assert rows["cycle-2"]["gradient_bytes"][0] == 4 * rows["cycle-2"]["parameters"][0]


def test_rows_of_equal_time_measure_their_speed_first(data, tmp_path):
    given = {"MINUTES": "0.001", "SEEDS": "1", "ROWS": "width-128", "PROBED": "64"}
    (tmp_path / "base" / "seed-1").mkdir(parents=True)  # still trained by another one
    done = run_recipe(tmp_path, data, SMALL_BUDGETS, **given)
    assert done.returncode == 0, done.stderr
    assert "base is left out of the table: 0 of 1 runs have ended" in done.stderr
    assert (tmp_path / "width-128" / "steps").read_text() == "20\n"  # the least
    assert not (tmp_path / "width-128" / "trial").exists()
    run = tmp_path / "width-128" / "seed-1"
    config = json.loads((run / "config.json").read_text())
    assert config["steps"] == 20 and config["warmup_steps"] == 2
    assert config["model"]["hidden_size"] == 128
    found = json.loads((tmp_path / "table.json").read_text())["width-128"]
    probed = json.loads((run / "probe.json").read_text())
    assert found["mlm"] == [probed["heldout_mlm_accuracy"]]
    assert found["bits"] == [probed["heldout_bits_per_byte"]]
    assert "| bits a byte | MLM accuracy |" in done.stdout


def ask_small_budgets(data, tmp_path, **environ) -> list[list[str]]:
    """The command lines of the trainer that recipe.sh asks for."""
    stub, asked = tmp_path / "python", tmp_path / "asked"
    stub.write_text(STUB.replace("\n", f'\n[ "$1" = -c ] && exec {sys.executable} "$@"\n', 1))
    stub.chmod(0o755)
    given = {"PYTHON": str(stub), "ASKED": str(asked), "STEPS": "3", **environ}
    done = run_recipe(tmp_path / "out", data, SMALL_BUDGETS, **given)
    assert done.returncode == 0, done.stderr
    words, commands = asked.read_text().splitlines(), []
    while words:
        count = int(words.pop(0))
        script, *argv = words[:count]
        del words[:count]
        if script == "albert_ds/train.py":
            commands.append(argv)
    return commands


def value_of(flag: str, argv: list[str]) -> str:
    return argv[len(argv) - argv[::-1].index(flag)]


def test_narrow_layers_that_share_nothing_have_the_parameters_of_the_shared_ones(data, tmp_path):
    rows = "base share-none share-none-narrow"
    sizes = {}
    for argv in ask_small_budgets(data, tmp_path, SEEDS="1", ROWS=rows):
        model = replace(read_config(argv, world_size=1).model, vocab_size=8000)
        sizes[Path(value_of("--output", argv)).parent.name] = sum(count_params(model).values())
    assert sizes["share-none-narrow"] == pytest.approx(sizes["base"], rel=0.02)
    assert sizes["share-none"] > 1.5 * sizes["base"]


def test_full_sequences_go_on_from_the_shorter_ones_of_the_same_seed(data, tmp_path):
    rows = "half-length half-then-full"
    half_1, half_2, *full = ask_small_budgets(data, tmp_path, SEEDS="2", ROWS=rows)
    assert [value_of("--sequence-length", argv) for argv in (half_1, full[0])] == ["32", "64"]
    for half, argv in zip((half_1, half_2), full, strict=True):
        assert value_of("--init-from", argv) == value_of("--output", half)
        assert value_of("--initial-attention", argv) == "random"  # neighbours would be refused


def test_warm_up_is_a_share_of_a_rows_steps(data, tmp_path):
    rows = {"base": "20", "warmup-2": "4", "warmup-20": "40"}
    asked = ask_small_budgets(data, tmp_path, SEEDS="1", ROWS=" ".join(rows), STEPS="200")
    found = {Path(value_of("--output", argv)).parent.name: argv for argv in asked}
    assert {name: value_of("--warmup-steps", found[name]) for name in rows} == rows


def test_a_row_that_does_not_exist_is_refused_before_the_others_train(data, tmp_path):
    given = {"STEPS": "3", "SEEDS": "1", "ROWS": "base", "AGAINST": "bass"}
    done = run_recipe(tmp_path, data, SMALL_BUDGETS, **given)
    assert done.returncode == 2 and "ROWS or AGAINST: bass is none of base " in done.stderr
    assert not (tmp_path / "base").exists()


def test_a_configuration_without_its_lamb_form_is_refused(data, tmp_path):
    done = run_recipe(tmp_path, data, SMALL_BUDGETS, CONFIG="ds_configs/zero1_fp32.json")
    assert done.returncode == 2 and "must end in _adamw.json" in done.stderr


def write_run(folder: Path, seconds: float, losses: list[float]) -> None:
    from dataclasses import asdict

    from tests.training import SMALL

    folder.mkdir(parents=True)
    config = {"model": asdict(SMALL), "stream": {"sequence_length": 32}}
    (folder / "config.json").write_text(json.dumps(config))
    records: list[dict] = []
    for step, loss in enumerate(losses, start=1):
        timed = {"flops": 100, "step_seconds": seconds, "tokens_per_second": 8}
        timed["num_layers"] = step
        records += [{"step": 10 * step, **timed}, {"step": 10 * step, "heldout_mlm_loss": loss}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_losses_at_equal_time_and_intervals(tmp_path):
    """40 steps in 40 s against 80 s: the slow row counts where it has taken 40 s."""
    for seed, shift in enumerate((0.0, 0.2), start=1):
        write_run(tmp_path / "fast" / f"seed-{seed}", 1.0, [x + shift for x in (4, 3, 2, 1)])
        write_run(tmp_path / "slow" / f"seed-{seed}", 2.0, [x + shift for x in (4, 3, 2, 1)])
    command = [sys.executable, "tools/lab/sharing_table.py", "--output", tmp_path / "x.json"]
    command += ["--rows", *(f"{name}={tmp_path / name}" for name in ("fast", "slow"))]
    command += ["--against", "fast"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "x.json").read_text())
    # Ten steps of 1 layer, ten of 2, ...
    assert rows["fast"]["layers_a_step"] == pytest.approx([2.5, 2.5])
    assert rows["fast"]["loss_at_time"] == pytest.approx([1.0, 1.2])
    assert rows["slow"]["loss_at_time"] == pytest.approx([3.0, 3.2])
    assert rows["slow"]["loss_at_flops"] == pytest.approx([1.0, 1.2])
    # The seeds differ by 0.2, the rows not at all: 0 for each seed.
    assert rows["slow"]["loss_difference"] == pytest.approx([0.0, 0.0])
    # Mean 1.1, standard error 0.1, t of 1 degree of freedom 12.706.
    assert "| 1.100 +- 1.271 |" in done.stdout
    differences = "Minus fast, seed by seed:\n\n| | MLM loss |\n| --- | ---: |\n| slow | 0.000 |\n"
    assert differences in done.stdout


def test_accuracies_are_compared_in_the_seeds_that_both_rows_have(tmp_path):
    accuracies = {"one": (0.5, 0.6), "other": (0.52, 0.64, 0.9)}
    for name, values in accuracies.items():
        for seed, value in enumerate(values, start=1):
            run = tmp_path / name / f"seed-{seed}"
            write_run(run, 1.0, [1.0])
            (run / "probe.json").write_text(json.dumps({"heldout_mlm_accuracy": value}))
    command = [sys.executable, "tools/lab/sharing_table.py", "--output", tmp_path / "x.json"]
    command += ["--rows", *(f"{name}={tmp_path / name}" for name in accuracies)]
    command += ["--against", "one"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    other = json.loads((tmp_path / "x.json").read_text())["other"]
    assert other["mlm_difference"] == pytest.approx([0.02, 0.04])
    assert "sop_difference" not in other
