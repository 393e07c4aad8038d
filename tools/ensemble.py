#!/usr/bin/env python
"""`albert-ds ensemble`, started from a clone."""

from albert_ds import cli
from albert_ds.commands.ensemble import main

if __name__ == "__main__":
    cli.run(main)
