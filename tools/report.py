#!/usr/bin/env python
"""`albert-ds report`, started from a clone."""

from albert_lab.clone import start

start("albert_lab.commands.report")
