#!/usr/bin/env python
"""`albert-ds inspect`, started from a clone."""

from albert_lab.clone import start

start("albert_ds.commands.inspect")
