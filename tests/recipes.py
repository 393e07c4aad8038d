"""Recipes of slurm/, run with stand-ins for Slurm and for Python: what they ask for."""

import subprocess
import sys
from pathlib import Path

from tests.command import run_bash, write_scripts

JOB = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
JOB |= {"SLURM_NTASKS": "2", "SLURM_RESTART_COUNT": "20"}
# Notes what it was asked to run, and leaves what a run leaves; of -c a recipe needs the answer.
PYTHON = f"""[ "$1" = -c ] && exec {sys.executable} "$@"
[ "$1" = -u ] && shift
[[ "$3" != @(train|finetune) ]] || run=yes
printf '%s\\n' "$#" "$@" >> "$ASKED"
while [ $# -gt 0 ]; do
    if [ "$1" = --output ]; then
        mkdir -p "$(dirname "$2")"
        [ -z "$run" ] || mkdir -p "$2"
        [ ! -d "$2" ] || echo '{{"code": 0}}' > "$2/exit.json"
    fi
    shift
done
"""
SRUN = 'while [ "$1" != "$PYTHON" ]; do shift; done; exec "$@"'


def start_recipe(recipe: Path, folder: Path, *argv, **environ) -> subprocess.CompletedProcess:
    """`None` unsets a variable."""
    path = write_scripts(folder / "bin", python=PYTHON, srun=SRUN, scontrol="echo node1")
    places = {"PYTHON": folder / "bin" / "python", "ASKED": folder / "asked", "OUT": folder / "out"}
    return run_bash(recipe, *argv, **{**JOB, **path, **places, "SITE_ENV": "/dev/null", **environ})


def ask_recipe(recipe: Path, folder: Path, *argv, **environ) -> list[list[str]]:
    """The commands that a recipe asks Python for, each as its name and its flags."""
    done = start_recipe(recipe, folder, *argv, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    words = (folder / "asked").read_text().splitlines()
    commands = []
    while words:
        count = int(words.pop(0))
        commands.append(words[:count])
        del words[:count]
    return [words[2:] if words[0] == "-m" else words for words in commands]
