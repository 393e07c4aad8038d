#!/usr/bin/env python
"""`albert-ds export` and `albert-ds import`, started from a clone."""

from albert_ds import cli
from albert_ds.commands.convert_hf import main

if __name__ == "__main__":
    cli.run(main)
