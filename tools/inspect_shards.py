#!/usr/bin/env python
"""`albert-ds inspect`, started from a clone."""

from albert_ds import cli
from albert_ds.commands.inspect_shards import main

if __name__ == "__main__":
    cli.run(main)
