#!/usr/bin/env python
"""`albert-ds plots`, started from a clone."""

from albert_lab.clone import start

start("albert_lab.commands.plots")
