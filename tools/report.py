#!/usr/bin/env python
"""`albert-ds report`, started from a clone."""

from albert_lab.commands.report import main

from albert_ds import cli

if __name__ == "__main__":
    cli.run(main)
