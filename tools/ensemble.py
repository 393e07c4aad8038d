#!/usr/bin/env python
"""`albert-ds ensemble`, started from a clone."""

from albert_lab.clone import start

start("albert_ds.commands.ensemble")
