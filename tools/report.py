#!/usr/bin/env python
"""`albert-ds report`, started from a clone."""

from albert_ds import cli
from albert_ds.lab.commands.report import main

if __name__ == "__main__":
    cli.run(main)
