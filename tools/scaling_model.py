#!/usr/bin/env python
"""`albert-ds plan`, started from a clone."""

from albert_ds import cli
from albert_ds.lab.commands.scaling_model import main

if __name__ == "__main__":
    cli.run(main)
