#!/usr/bin/env python
"""`albert-ds plots`, started from a clone."""

from albert_ds import cli
from albert_ds.lab.commands.plots import main

if __name__ == "__main__":
    cli.run(main)
