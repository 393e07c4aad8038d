#!/usr/bin/env python
"""`albert-ds check-gpu`, started from a clone."""

from albert_lab.commands.gpu_check import main

from albert_ds import cli

if __name__ == "__main__":
    cli.run(main)
