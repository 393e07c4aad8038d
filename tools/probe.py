#!/usr/bin/env python
"""`albert-ds probe`, started from a clone."""

from albert_lab.clone import start

start("albert_ds.commands.probe")
