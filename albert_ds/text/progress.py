"""How far a pass over the text is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from albert_ds.base.cli import log_line
from albert_ds.text.sources import Reading

LINE_SECONDS = 30.0  # between two lines of progress if there is no terminal


def open_bar(what: str, unit: str, total: int = 0) -> tqdm:
    """A progress bar on a terminal, a line now and then elsewhere."""
    seconds = 0.1 if sys.stderr.isatty() else LINE_SECONDS
    options = {"mininterval": seconds, "maxinterval": max(10.0, seconds), "delay": seconds}
    return tqdm(total=total, desc=what, unit=unit, unit_scale=True, **options)


def tell_progress(readings: Iterable[Reading], size: int) -> Iterator[Reading]:
    """The documents of a unit of `size` bytes, with a line now and then if there are very many."""
    told = time.monotonic()
    for number, reading in enumerate(readings, 1):
        if time.monotonic() > told + LINE_SECONDS:
            told = time.monotonic()
            done = f"{reading.bytes_read:,} of {size:,} bytes of this unit of work"
            log_line(f"{reading.name}: {number:,} documents, {done}")
        yield reading
