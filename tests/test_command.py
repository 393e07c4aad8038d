"""One command for everything: what it finds, what it says, and what it writes."""

import subprocess
import sys

import pytest

from albert_ds.__main__ import COMMANDS, main
from albert_ds.cli import require
from albert_ds.commands import path, recipes
from albert_ds.errors import UserError
from tests.conftest import ROOT

BENCHMARK = str(ROOT / "docs/raw/bench_base_2.json")


@pytest.mark.parametrize(("argv", "says"), [(["vocabs"], "'vocabs'"), ([], "COMMAND")])
def test_a_wrong_command_is_one_line(argv, says):
    with pytest.raises(UserError, match=says) as found:
        main(argv)
    assert "\n" not in str(found.value)


def test_every_tool_of_a_clone_is_a_command():
    modules = {module for commands in COMMANDS.values() for module, _ in commands.values()}
    for tool in (ROOT / "tools").glob("*.py"):
        started = {m for m in modules if f'start("{m}")' in tool.read_text()}
        assert len(started) == 1 and tool.read_text().count("\n") < 10, tool


def test_where_the_files_are(capsys):
    for name, place in (("train", "albert_ds/train.py"), ("slurm", "slurm")):
        path.main([name])
        assert (ROOT / place).samefile(capsys.readouterr().out.strip())


def test_recipes_are_written_and_never_replaced(tmp_path, capsys):
    recipes.main(["--output", str(tmp_path / "new")])
    for file in ("slurm/base.sh", "slurm/site.env.example", "ds_configs/zero1_bf16.json"):
        assert (tmp_path / "new" / file).read_bytes() == (ROOT / file).read_bytes()
    recipes.main(["--output", str(tmp_path / "new")])
    edited = tmp_path / "new" / "slurm" / "base.sh"
    edited.write_text("mine")
    (tmp_path / "new" / "slurm" / "common.sh").unlink()
    with pytest.raises(UserError, match="base.sh: is there already and differs"):
        recipes.main(["--output", str(tmp_path / "new")])
    assert edited.read_text() == "mine" and not edited.with_name("common.sh").exists()


def test_a_missing_extra_is_one_line_that_says_how_to_get_it(tmp_path):
    """In a process that has no extra at all: what a plain installation lacks."""
    lacking = (
        "'mpi4py', 'matplotlib', 'wandb', 's3fs', 'transformers', 'huggingface_hub', 'nervaluate'"
    )
    script = (
        "import sys, importlib.util as u\n"
        f"find = u.find_spec; lacking = {{{lacking}}}\n"
        "u.find_spec = lambda name, *a: None if name in lacking else find(name, *a)\n"
        "from albert_ds.__main__ import run\n"
        "run()\n"
    )
    folder = str(tmp_path)
    tagger = ["finetune", "--task", "tokens", "--data", folder, "--checkpoint", folder]
    for words, extra in (
        (["plots", "traffic", "--input", BENCHMARK, "--output", f"{folder}/x.png"], "plots"),
        ([*tagger, "--output", f"{folder}/out"], "ner"),
        (["vocab", "--input", "s3://bucket/x", "--output", folder], "s3"),
    ):
        command = [sys.executable, "-c", script, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and f"pip install 'albert-ds[{extra}]'" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    with pytest.raises(UserError, match=r"--x: the package absent_x is .*'albert-ds\[y\]'"):
        require("absent_x", "y", "--x")
