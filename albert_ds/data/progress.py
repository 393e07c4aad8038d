"""How far a long read has come: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

LINE_SECONDS = 30.0


@contextmanager
def show_progress(total_bytes: int, what: str) -> Generator[Callable[[int, int], None]]:
    """Gives a function to be told the documents and the bytes that were read, both so far."""
    show = _show_bar if sys.stderr.isatty() else _print_lines
    with show(total_bytes, what) as advance:
        yield advance


@contextmanager
def _show_bar(total_bytes: int, what: str) -> Generator[Callable[[int, int], None]]:
    from tqdm import tqdm

    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True) as bar:
        begun = time.monotonic()

        def advance(documents: int, read: int) -> None:
            rate = documents / max(time.monotonic() - begun, 1e-9)
            bar.set_postfix_str(f"{documents:,} documents, {rate:,.0f}/s", refresh=False)
            bar.update(read - bar.n)

        yield advance


@contextmanager
def _print_lines(total_bytes: int, what: str) -> Generator[Callable[[int, int], None]]:
    begun = time.monotonic()
    due = begun + LINE_SECONDS

    def advance(documents: int, read: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now < due:
            return
        due = now + LINE_SECONDS
        seconds = now - begun
        left = seconds * (total_bytes - read) / max(read, 1)
        print(
            f"{what}: {documents:,} documents, {read / max(total_bytes, 1):.0%} of the input, "
            f"{documents / seconds:,.0f} documents/s, {read / seconds / 1e6:.1f} MB/s, "
            f"{left / 60:.0f} min left",
            flush=True,
        )

    yield advance
