"""tools/build_shards.py with pieces of work small enough for a test, and a kill at a chosen one.

KILL_AT=3         this process sends itself SIGKILL when its third piece is made, not yet noted
KILL_AFTER=3      ... when it is noted
PAUSE=300         it sleeps so many seconds after each note
"""

import itertools
import os
import runpy
import signal
import time
from pathlib import Path

from albert_ds.text import external_sort, sources
from albert_ds.text.manifest import Manifest

sources.UNIT_BYTES, external_sort.RUN_BYTES, external_sort.RANGE_BYTES = 4000, 3000, 3000
number = itertools.count(1)
write = Manifest.write


def write_or_die(self, *args):
    at = str(next(number))
    if os.environ.get("KILL_AT") == at:
        os.kill(os.getpid(), signal.SIGKILL)
    note = write(self, *args)
    if os.environ.get("KILL_AFTER") == at:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(os.environ.get("PAUSE", 0)))
    return note


Manifest.write = write_or_die
runpy.run_path(str(Path(__file__).parents[2] / "tools" / "build_shards.py"), run_name="__main__")
