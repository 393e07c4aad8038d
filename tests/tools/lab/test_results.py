"""results.sh asks every benchmark for what it takes, once, and only in a tree without changes."""

import os
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from albert_lab.commands import throughput_bench

from tests.conftest import ROOT

STUB = """#!/bin/bash
printf '%s\\n' "$#" "$@" >> "$ASKED"
echo "$PYTHONPATH" >> "$ASKED.path"
while [ "$1" != --output ]; do shift; done
echo '{}' > "$2"
"""


@pytest.fixture
def tree(tmp_path):
    """A repository with the script and what it names."""
    (tmp_path / "tools" / "lab").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "lab" / "results.sh", tmp_path / "tools" / "lab")
    shutil.copytree(ROOT / "ds_configs", tmp_path / "ds_configs")
    (tmp_path / ".gitignore").write_text("/build/\n")
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    return tmp_path


def measure(tree: Path, **environ) -> subprocess.CompletedProcess:
    given = {**os.environ, "PYTHON": "./python", "ASKED": str(tree / "build" / "asked")}
    (tree / "build").mkdir(exist_ok=True)
    command = ["bash", "tools/lab/results.sh"]
    return subprocess.run(
        command, env=given | environ, cwd=tree, capture_output=True, text=True, timeout=60
    )


def read_asked(tree: Path) -> list[list[str]]:
    words, found = (tree / "build" / "asked").read_text().splitlines(), []
    while words:
        count = int(words.pop(0))
        found.append(words[:count])
        del words[:count]
    return found


def test_every_command_is_one_that_the_benchmark_takes(tree, monkeypatch):
    done = measure(tree)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tree)
    asked = read_asked(tree)
    for words in asked:
        if words[:2] == ["-m", "albert_ds"]:
            parser, argv = throughput_bench.build_parser(), words[3:]
        else:
            module = import_module(words[0].removesuffix(".py").replace("/", "."))
            parser, argv = module.build_parser(), words[1:]
        parser.parse_args([*argv[:-1], "build/new.json"])
        assert argv[-2] == "--output" and argv[-1].startswith("build/results/")
    names = {Path(words[-1]).name for words in asked}
    assert len(names) == len(asked)
    kept = {path.name for path in (ROOT / "docs" / "raw").iterdir()}
    assert names <= kept and {name for name in kept if name.startswith("peer_")} <= names
    # The scripts import the tree that they stand in, not what the environment was installed from.
    assert {*(tree / "build" / "asked.path").read_text().splitlines()} == {str(tree)}
    measure(tree)
    assert read_asked(tree) == asked  # what is there is kept


def test_a_changed_tree_and_a_wrong_name_are_refused(tree):
    done = measure(tree, ONLY="bench_huge")
    assert done.returncode == 2 and "ONLY: bench_huge is none of bench_large " in done.stderr
    (tree / "python").write_text("changed")
    done = measure(tree)
    assert done.returncode == 2 and "the tree has changes" in done.stderr
