#!/usr/bin/env python
"""`albert-ds bench`, started from a clone."""

from albert_lab.commands.throughput_bench import main

from albert_ds import cli

if __name__ == "__main__":
    cli.run(main)
