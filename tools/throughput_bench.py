#!/usr/bin/env python
"""`albert-ds bench`, started from a clone."""

from albert_ds import cli
from albert_ds.lab.commands.throughput_bench import main

if __name__ == "__main__":
    cli.run(main)
