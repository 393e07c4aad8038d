"""The studies of sharing and of recipes ask for what the trainer takes; the table is arithmetic."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from albert_ds.base.json_files import read_json
from albert_ds.model.depth import Depths, draw_depth
from albert_ds.model.shapes import count_params
from albert_ds.settings.pretrain import read_config
from tests.command import ROOT, run_bash
from tests.recipes import ask_recipe
from tests.runs import SMALL
from tools.lab.sharing_table import main as compare
from tools.lab.sharing_table import read_curve

SHARING, RECIPE = (ROOT / "slurm" / "ablations" / f"{name}.sh" for name in ("sharing", "recipe"))


def ask(script: Path, data, tmp_path, **environ) -> dict[str, list[str]]:
    """Each run that a study asks for, as ROW/seed-N, with the trainer's flags."""
    runs = {}
    for command, *argv in ask_recipe(script, tmp_path, DATA=data, LENGTH=64, **environ):
        if command in ("train", "albert_ds/train.py"):
            runs["/".join(Path(value_of("--output", argv)).parts[-2:])] = argv
    return runs


def run_study(script: Path, out: Path, data, **environ) -> subprocess.CompletedProcess:
    given = {"DATA": data, "OUT": out, "PYTHON": sys.executable, "LENGTH": 64, **environ}
    return run_bash(script, **given)


def value_of(flag: str, argv: list[str]) -> str:
    return argv[len(argv) - argv[::-1].index(flag)]


def test_every_row_is_a_run_and_equal_parameters_are_equal(data, tmp_path):
    asked = ask(SHARING, data, tmp_path, SEEDS="2")
    (tmp_path / "two").mkdir()
    two = ask(SHARING, data, tmp_path / "two", SEEDS="1", ROWS="cycle-2\ndepth-2-3-6")
    assert set(two) == {"cycle-2/seed-1", "depth-2-3-6/seed-1"}
    configs = {run: read_config(argv, world_size=1)[0] for run, argv in asked.items()}
    names = {run.partition("/")[0]: config for run, config in configs.items()}
    assert len(names) == 23 and len(configs) == 46
    assert {config.seed for config in configs.values()} == {1, 2}
    for blocks in (2, 3):
        patterns = (f"groups-{blocks}", f"cycle-{blocks}", f"cycle-rev-{blocks}")
        assert len({str(count_params(names[name].model)) for name in patterns}) == 1
        assert len({str(names[name].model.plan) for name in patterns}) == 3
    late = names["loop-late"]
    assert {late.model_at(step).num_layers for step in range(late.steps)} == {4, 6}
    schedule = names["depth-2-3-6"]
    assert {schedule.model_at(step).num_layers for step in range(schedule.steps)} == {2, 3, 6}


@pytest.mark.parametrize(
    ("script", "environ", "words"),
    [
        (SHARING, {"DATA": ""}, "DATA is not set"),
        (SHARING, {"SCALE": "Paper"}, "SCALE=Paper: must be tiny or paper"),
        (SHARING, {"SCALE": "paper", "SLURM_JOB_ID": ""}, "is for a Slurm job"),
        (SHARING, {"ROWS": "cycle-9", "PYTHON": "false"}, "ROWS: cycle-9 is none of groups-2 "),
        # Refused before the other rows train.
        (RECIPE, {"ROWS": "base", "AGAINST": "bass"}, "ROWS or AGAINST: bass is none of base "),
        (RECIPE, {"CONFIG": "ds_configs/zero1_fp32.json"}, "must end in _muon.json"),
    ],
)
def test_a_wrong_setting_is_one_line(script, environ, words, data, tmp_path):
    done = run_study(script, tmp_path, data, **environ)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_two_rows_of_three_steps_make_a_table_and_resume(data, tmp_path):
    given = {"STEPS": "3", "SEEDS": "1"}
    first, again = (
        run_study(SHARING, tmp_path, data, **given, ROWS=rows)
        for rows in ("depth-2-3-6", "depth-2-3-6 cycle-2")
    )
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "resuming from" in again.stderr and "resuming from" not in first.stderr
    head, _, depth, cycle = again.stdout[again.stdout.index("| |") :].splitlines()[:4]
    assert head.startswith(
        "| | parameters | MFLOPs a token | tokens/s | gradient MB a step | layers"
    )
    assert depth.startswith("| depth-2-3-6 |") and cycle.startswith("| cycle-2 |")
    row = json.loads((tmp_path / "table.json").read_text())["cycle-2"]
    assert row["layers_a_step"] == [6.0]
    assert row["loss"][0] == read_curve(tmp_path / "cycle-2" / "seed-1").losses[-1]
    assert row["gradient_bytes"][0] == 4 * row["parameters"][0]


@pytest.mark.nightly
def test_rows_of_equal_time_measure_their_speed_first(data, tmp_path):
    given = {"MINUTES": "0.001", "SEEDS": "1", "ROWS": "width-128", "PROBED": "64"}
    (tmp_path / "base" / "seed-1").mkdir(parents=True)  # still trained by another one
    done = run_study(RECIPE, tmp_path, data, **given)
    assert done.returncode == 0, done.stderr
    assert "base is left out of the table: 0 of 1 runs have ended" in done.stderr
    assert (tmp_path / "width-128" / "steps").read_text() == "20\n"  # the least
    assert not (tmp_path / "width-128" / "trial").exists()
    run = tmp_path / "width-128" / "seed-1"
    config = json.loads((run / "config.json").read_text())
    assert config["steps"] == 20 and config["warmup_steps"] == 2
    assert config["model"]["hidden_size"] == 128
    row = json.loads((tmp_path / "table.json").read_text())["width-128"]
    probed = json.loads((run / "probe.json").read_text())
    assert row["mlm"] == [probed["heldout_mlm_accuracy"]]
    assert row["bits"] == [probed["heldout_bits_per_byte"]]
    assert "| bits a byte | MLM accuracy |" in done.stdout


def without_start(argv: list[str]) -> list[str]:
    """A row's flags without the weights it starts from, which the stub has not written."""
    at = argv.index("--init-from")
    return argv[:at] + argv[at + 2 :]


def test_what_the_rows_of_a_recipe_change(data, tmp_path):
    warm = {"base": "20", "warmup-2": "4", "warmup-20": "40"}
    rows = [*warm, "share-none", "share-none-narrow", "half-length", "half-then-full"]
    asked = ask(RECIPE, data, tmp_path, SEEDS="2", ROWS=" ".join(rows), STEPS="200")
    # Warm-up is a share of a row's steps.
    assert {n: value_of("--warmup-steps", asked[f"{n}/seed-1"]) for n in warm} == warm
    # Narrow layers that share nothing have the parameters of the shared ones.
    base, wide, narrow = (
        sum(count_params(replace(config.model, vocab_size=8000)).values())
        for name in ("base", "share-none", "share-none-narrow")
        for config in [read_config(without_start(asked[f"{name}/seed-1"]), world_size=1)[0]]
    )
    assert narrow == pytest.approx(base, rel=0.02) and wide > 1.5 * base
    # Full sequences go on from the shorter ones of the same seed.
    for seed in (1, 2):
        half, full = (asked[f"{name}/seed-{seed}"] for name in ("half-length", "half-then-full"))
        assert [value_of("--sequence-length", argv) for argv in (half, full)] == ["32", "64"]
        assert value_of("--init-from", full) == value_of("--output", half)
        assert full.count("--init-from") == 1


def test_rows_of_another_constant_have_a_configuration_of_their_own(data, tmp_path):
    changed = {
        "adam-rate-0.006": {"adam_lr": 0.006},
        "matrix-rate-0.006": {"adam_lr": 0.003},
        "adam-beta-0.999": {"betas": [0.9, 0.999]},
        "momentum-0.9": {"momentum": 0.9},
    }
    asked = ask(RECIPE, data, tmp_path, SEEDS="1", ROWS="\n".join(["base", *changed]), STEPS="200")
    base, *others = (
        read_json(Path(value_of("--deepspeed_config", asked[f"{name}/seed-1"])))
        for name in ("base", *changed)
    )
    for config, change in zip(others, changed.values(), strict=True):
        params = base["optimizer"]["params"] | change
        assert config == base | {"optimizer": base["optimizer"] | {"params": params}}


def test_an_edit_that_finds_nothing_in_config_is_one_line(data, tmp_path):
    config = tmp_path / "zero1_fp32_muon.json"
    config.write_text((ROOT / "ds_configs" / config.name).read_text().replace("0.99]", "0.9]"))
    given = {"CONFIG": config, "ROWS": "adam-beta-0.95", "STEPS": "1"}
    done = run_study(RECIPE, tmp_path / "out", data, **given)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "adam-beta-0.95: nothing in" in done.stderr


def test_one_rate_falls_through_both_runs_of_a_late_sentence_loss(data, tmp_path):
    asked = ask(RECIPE, data, tmp_path, SEEDS="1", ROWS="late-pairs-before late-pairs", STEPS="300")
    before, after = (
        read_config(without_start(asked[f"{name}/seed-1"]), world_size=1)[0]
        for name in ("late-pairs-before", "late-pairs")
    )
    assert before.steps + after.steps == 300
    assert after.rate_at(after.warmup_steps) == pytest.approx(before.rate_at(before.steps), rel=0.1)
    assert value_of("--init-from", asked["late-pairs/seed-1"]).endswith("late-pairs-before/seed-1")


def write_run(
    folder: Path, seconds: float, losses: list[float], start: Path | None = None, **probed
) -> None:
    folder.mkdir(parents=True)
    config = {"model": asdict(SMALL), "seed": 34, "steps": 40, "depth_schedule": "1@0,1-3@10"}
    config["init_from"] = start and str(start)
    (folder / "config.json").write_text(json.dumps(config))
    records: list[dict] = []
    for step, loss in enumerate(losses, start=1):
        timed = {"flops": 100, "step_seconds": seconds, "tokens_per_second": 8}
        timed["num_layers"] = 3  # of the interval's last step
        records += [{"step": 10 * step, **timed}, {"step": 10 * step, "heldout_mlm_loss": loss}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "probe.json").write_text(json.dumps(probed))


def read_table(tmp_path, against: str, *names: str) -> dict:
    rows = ("--rows", *(f"{name}={tmp_path / name}" for name in names))
    compare([*rows, "--against", against, "--output", str(tmp_path / "x.json")])
    return json.loads((tmp_path / "x.json").read_text())


def test_losses_at_equal_time_and_intervals(tmp_path, capsys):
    """40 steps in 40 s against 80 s: the slow row counts where it has taken 40 s."""
    for seed, shift in enumerate((0.0, 0.2), start=1):
        write_run(tmp_path / "fast" / f"seed-{seed}", 1.0, [x + shift for x in (4, 3, 2, 1)])
        write_run(tmp_path / "slow" / f"seed-{seed}", 2.0, [x + shift for x in (4, 3, 2, 1)])
    rows = read_table(tmp_path, "fast", "fast", "slow")
    # Ten steps of 1 layer, thirty of 1 to 3.
    drawn = [draw_depth(Depths((1, 2, 3)), 34, step) for step in range(10, 40)]
    assert rows["fast"]["layers_a_step"] == pytest.approx(2 * [(10 + sum(drawn)) / 40])
    # What a token cost, whatever its masks, heads, depth and length were: 100 FLOPs, 8 a second.
    assert rows["fast"]["flops_a_token"] == pytest.approx([12.5, 12.5])
    assert rows["slow"]["flops_a_token"] == pytest.approx([6.25, 6.25])
    assert rows["fast"]["loss_at_time"] == pytest.approx([1.0, 1.2])
    assert rows["slow"]["loss_at_time"] == pytest.approx([3.0, 3.2])
    assert rows["slow"]["loss_at_flops"] == pytest.approx([1.0, 1.2])
    # The seeds differ by 0.2, the rows not at all: 0 for each seed.
    assert rows["slow"]["loss_difference"] == pytest.approx([0.0, 0.0])
    # Mean 1.1, standard error 0.1, t of 1 degree of freedom 12.706.
    printed = capsys.readouterr().out
    assert "| 1.100 +- 1.271 |" in printed
    differences = "Minus fast, seed by seed:\n\n| | MLM loss |\n| --- | ---: |\n| slow | 0.000 |\n"
    assert differences in printed


def test_a_run_has_spent_what_the_run_of_its_first_weights_spent(tmp_path, capsys):
    """20 steps from the weights of 20: after 30 s the row is in its second run, base at its end."""
    write_run(tmp_path / "base" / "seed-1", 1.0, [4, 3, 2])
    first = tmp_path / "first" / "seed-1"
    write_run(first, 1.0, [4, 3])
    write_run(tmp_path / "second" / "seed-1", 1.0, [2.5, 1], start=first)
    (tmp_path / "start").mkdir()  # weights that no run trained
    write_run(tmp_path / "other" / "seed-1", 1.0, [4, 3, 2], start=tmp_path / "start")
    rows = read_table(tmp_path, "base", "base", "second", "other")
    assert [rows[name]["loss_at_time"] for name in ("base", "second", "other")] == [[2], [2.5], [2]]
    assert rows["second"]["loss_at_flops"] == [2.5] and rows["second"]["loss"] == [1]
    printed = capsys.readouterr()
    assert "Steps [30, 40], seeds [1]; equal FLOPs: 3e+03, equal time: 30 s" in printed.out
    assert printed.err == ""
    first.rename(tmp_path / "moved")
    assert read_table(tmp_path, "base", "base", "second")["base"]["loss_at_time"] == [3]
    assert f"{first} is gone; what its weights cost is not counted" in capsys.readouterr().err


def test_accuracies_are_compared_in_the_seeds_that_both_rows_have(tmp_path):
    for name, values in {"one": (0.5, 0.6), "other": (0.52, 0.64, 0.9)}.items():
        for seed, value in enumerate(values, start=1):
            run = tmp_path / name / f"seed-{seed}"
            write_run(run, 1.0, [1.0], heldout_mlm_accuracy=value)
    other = read_table(tmp_path, "one", "one", "other")["other"]
    assert other["mlm_difference"] == pytest.approx([0.02, 0.04])
    assert "sop_difference" not in other
