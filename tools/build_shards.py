#!/usr/bin/env python
"""`albert-ds shards`, started from a clone."""

from albert_lab.clone import start

start("albert_ds.commands.shards")
