#!/usr/bin/env python
"""`albert-ds traffic`, started from a clone."""

from albert_lab.clone import start

start("albert_lab.commands.comm_volume")
