#!/usr/bin/env python
"""`albert-ds traffic`, started from a clone."""

from albert_lab.commands.comm_volume import main

from albert_ds import cli

if __name__ == "__main__":
    cli.run(main)
