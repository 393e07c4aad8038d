"""Every Slurm recipe is sound bash, and its training command is one that the trainer accepts."""

import os
import re
import subprocess
from dataclasses import replace

import pytest

from albert_ds.config import read_config
from albert_ds.runtime.ds_config import read_ds_config
from tests.conftest import ROOT

RECIPES = sorted(path for path in (ROOT / "slurm").glob("*.sh") if path.name != "common.sh")


def sbatch_option(recipe, name: str) -> str:
    return re.search(rf"^#SBATCH --{name}=(\S+)", recipe.read_text(), re.M)[1]


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sh")), ids=lambda p: p.name)
def test_bash_accepts_it(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.name)
def test_recipe_is_short_and_its_command_resolves(recipe, data, tmp_path):
    text = recipe.read_text()
    assert text.count("\n") <= 30
    for word in ("Command:", "Hardware:", "Time:", "Expected:"):
        assert word in text, f"the header does not state {word}"
    # Run the recipe itself with an srun that only says what it was asked to run.
    (tmp_path / "bin").mkdir()
    for name, body in (
        ("srun", 'while [ "$1" != -u ]; do shift; done; shift 2; printf "%s\\n" "$@" > "$ASKED"'),
        ("scontrol", 'echo "node1"'),
    ):
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/bash\n{body}\n")
        tool.chmod(0o755)
    (tmp_path / "exit.json").write_text('{"code": 0}')
    asked = tmp_path / "asked"
    done = subprocess.run(
        ["bash", recipe],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "ASKED": str(asked),
            "DATA": str(data),
            "OUTPUT": str(tmp_path),
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "node1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    argv = asked.read_text().splitlines()
    ranks = int(sbatch_option(recipe, "nodes")) * int(sbatch_option(recipe, "ntasks-per-node"))
    config = read_config(argv, world_size=ranks)
    assert config.batch_size == 4096 and config.learning_rate == 0.00176
    assert replace(config.model, vocab_size=30_000).hidden_size in (768, 1024, 2048, 4096)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_deepspeed_configs_are_accepted(path):
    config = read_ds_config(path)
    stage, precision, *_ = path.stem.removeprefix("zero").split("_")
    assert config["zero_optimization"]["stage"] == int(stage)
    enabled = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")]
    assert enabled == ([] if precision == "fp32" else [precision])
