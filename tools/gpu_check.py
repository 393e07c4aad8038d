#!/usr/bin/env python
"""`albert-ds gpu-check`, started from a clone."""

from albert_lab.clone import start

start("albert_lab.commands.gpu_check")
