#!/usr/bin/env python
"""`albert-ds scaling`, started from a clone."""

from albert_lab.clone import start

start("albert_lab.commands.scaling_model")
