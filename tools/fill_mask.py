#!/usr/bin/env python
"""`albert-ds fill-mask`, started from a clone."""

from albert_ds import cli
from albert_ds.commands.fill_mask import main

if __name__ == "__main__":
    cli.run(main)
