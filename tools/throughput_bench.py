#!/usr/bin/env python
"""`albert-ds bench`, started from a clone."""

from albert_lab.clone import start

start("albert_lab.commands.throughput_bench")
