#!/usr/bin/env python
"""`albert-ds traffic`, started from a clone."""

from albert_ds import cli
from albert_ds.lab.commands.comm_volume import main

if __name__ == "__main__":
    cli.run(main)
