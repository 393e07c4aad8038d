"""How far a long read has come: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator

from albert_ds.data.readers import Document

LINE_SECONDS = 30.0


def show_progress(documents: Iterable[Document], total_bytes: int, what: str) -> Iterator[Document]:
    """Pass `documents` on; `total_bytes` is the size of all files that they are read from."""
    if sys.stderr.isatty():
        yield from _show_bar(documents, total_bytes, what)
    else:
        yield from _print_lines(documents, total_bytes, what)


def _show_bar(documents: Iterable[Document], total_bytes: int, what: str) -> Iterator[Document]:
    from tqdm import tqdm

    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True) as bar:
        for document in documents:
            bar.update(document.bytes_read - bar.n)
            yield document


def _print_lines(documents: Iterable[Document], total_bytes: int, what: str) -> Iterator[Document]:
    due = time.monotonic() + LINE_SECONDS
    for number, document in enumerate(documents, 1):
        if time.monotonic() > due:
            share = document.bytes_read / max(1, total_bytes)
            print(f"{what}: {number:,} documents, {share:.0%} of the input", flush=True)
            due = time.monotonic() + LINE_SECONDS
        yield document
