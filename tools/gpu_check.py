#!/usr/bin/env python
"""`albert-ds check-gpu`, started from a clone."""

from albert_ds import cli
from albert_ds.lab.commands.gpu_check import main

if __name__ == "__main__":
    cli.run(main)
