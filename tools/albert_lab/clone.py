"""Start a command from a clone that need not be installed: what tools/*.py share."""

import os
import sys
from importlib import import_module
from pathlib import Path

PLACES = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]  # tools/, the clone


def start(module: str) -> None:
    """Run the command that `module` holds; the clone's packages come before installed ones."""
    sys.path[:0] = PLACES
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, *inherited])  # for what it starts
    from albert_ds.base import cli

    cli.run(import_module(module).main)
