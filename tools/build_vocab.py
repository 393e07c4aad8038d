#!/usr/bin/env python
"""`albert-ds vocab`, started from a clone."""

from albert_lab.clone import start

start("albert_ds.commands.vocab")
