"""The users' commands start from a clone without an installation of the project."""

import os
import subprocess
import sys
import sysconfig

from tests.conftest import ROOT


def test_every_tool_starts_where_only_the_dependencies_are_installed():
    # -S: no .pth file is read, so an editable installation of the project is not found.
    environ = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    for tool in sorted((ROOT / "tools").glob("*.py")):
        command = [sys.executable, "-S", tool, "--help"]
        done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True)
        assert done.stdout.startswith(f"usage: {tool.name} "), done.stderr
