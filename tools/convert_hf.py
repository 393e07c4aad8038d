#!/usr/bin/env python
"""`albert-ds export` and `albert-ds import`, started from a clone."""

from albert_lab.clone import start

start("albert_ds.commands.export")
