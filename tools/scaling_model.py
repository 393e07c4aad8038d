#!/usr/bin/env python
"""`albert-ds plan`, started from a clone."""

from albert_lab.commands.scaling_model import main

from albert_ds import cli

if __name__ == "__main__":
    cli.run(main)
