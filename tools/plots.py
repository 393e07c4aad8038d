#!/usr/bin/env python
"""`albert-ds plots`, started from a clone."""

from albert_lab.commands.plots import main

from albert_ds import cli

if __name__ == "__main__":
    cli.run(main)
