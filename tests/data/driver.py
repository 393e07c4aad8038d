"""`albert-ds shards` with pieces of work small enough for a test, and a kill at a chosen one.

KILL_AT=3         this process sends itself SIGKILL when its third piece is made, not yet noted
KILL_AFTER=3      ... when it is noted
PAUSE=300         it sleeps so many seconds after each note
"""

import itertools
import os
import signal
import time

from albert_ds.base import cli
from albert_ds.commands import shards
from albert_ds.text import external_sort, passes, sources

sources.UNIT_BYTES, external_sort.RUN_BYTES, external_sort.RANGE_BYTES = 4000, 3000, 3000
number = itertools.count(1)
write = passes.write_note


def write_or_die(*args):
    at = str(next(number))
    if os.environ.get("KILL_AT") == at:
        os.kill(os.getpid(), signal.SIGKILL)
    note = write(*args)
    if os.environ.get("KILL_AFTER") == at:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(os.environ.get("PAUSE", 0)))
    return note


passes.write_note = write_or_die
if __name__ == "__main__":  # and not again in the processes that it starts
    cli.run(shards.main)
