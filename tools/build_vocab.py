#!/usr/bin/env python
"""`albert-ds vocab`, started from a clone."""

from albert_ds import cli
from albert_ds.commands.build_vocab import main

if __name__ == "__main__":
    cli.run(main)
