#!/usr/bin/env python
"""`albert-ds learn`, started from a clone."""

from albert_lab.clone import start

start("albert_lab.commands.learn")
