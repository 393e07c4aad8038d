#!/usr/bin/env python
"""`albert-ds fill-mask`, started from a clone."""

from albert_lab.clone import start

start("albert_ds.commands.fill_mask")
