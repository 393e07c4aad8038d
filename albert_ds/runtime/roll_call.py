"""Which ranks are missing, by name: at the start, when a collective fails, and when a run hangs.

The ranks share a key-value store, kept by rank 0. At the start each writes its host name there and
waits for all others. From then on a thread of each writes a number that goes up while the process
lives, and how many batches it has read. A rank whose number stands still is gone or frozen;
one whose place is behind holds the others up. torch's own timeouts only say that somebody is.
"""

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from albert_ds.errors import MachineFailed
from albert_ds.runtime.ending import end_hung_run
from albert_ds.runtime.launch import World, open_store

INTERVAL = 1.0  # seconds between two signs of life; a fifth of the timeout where that is less
FAILED = (RuntimeError, ValueError)  # what a store raises whose host has gone (DistError is one)
LEFT = b"left"


def gather_world(world: World, *, minutes: float):
    """Wait until every rank has come; returns their store (None for one rank alone). Collective.

    Raises MachineFailed naming the ranks that did not come within `minutes`.
    """
    import torch.distributed as dist

    if world.size == 1:
        return None
    patience = timedelta(minutes=minutes)
    try:
        store = open_store(world, patience, is_host=world.rank == 0)
        store.set(f"life/{world.rank}", "0 0")
        store.set(f"host/{world.rank}", os.uname().nodename)
    except dist.DistError as error:
        raise MachineFailed(
            f"rank {world.rank} of {world.size}: no meeting at {world.address} within "
            f"{minutes:g} min (--timeout-minutes): {str(error).splitlines()[0][:160]}"
        ) from None
    hosts = [f"host/{rank}" for rank in range(world.size)]
    try:
        store.wait(hosts, patience)
    except dist.DistStoreError:
        missing = [rank for rank, host in enumerate(hosts) if not store.check([host])]
        raise MachineFailed(
            f"{list_ranks(missing)} of {world.size} did not come to {world.address} within "
            f"{minutes:g} min (--timeout-minutes)"
        ) from None
    except dist.DistError:
        raise MachineFailed("rank 0 left before all ranks had come") from None
    return store


class RollCall:
    """Signs of life of all ranks; ends this one, with RUN/exit.json, when the run hangs."""

    def __init__(self, world: World, output: Path, *, minutes: float):
        self._world, self._output, self._timeout = world, output, 60 * minutes
        self._interval = min(INTERVAL, self._timeout / 5)
        self._place, self._since = 0, time.monotonic()
        self._answered = time.monotonic()  # when the store last did
        self._is_asked = False  # the main thread wants to know
        self._is_alone = False  # rank 0, and the store with it, has gone
        self._hosts: list[bytes] = []
        self._rolls: list[list[bytes]] = []  # the last few, an interval apart
        self._over = threading.Event()
        if world.size > 1:
            for work in (self._tell, self._judge):
                threading.Thread(target=work, daemon=True).start()

    def follow(self, batches: Iterator) -> Iterator:
        """The same micro-batches; with each the training has come a place further."""
        for batch in batches:
            self._place += 1
            self._since = time.monotonic()
            yield batch

    def close(self) -> None:
        """This rank leaves as it should; call it before the others can see it go."""
        self._over.set()

    def name_missing(self) -> str | None:
        """After a collective has failed: who is gone, None where the roll does not say."""
        if self._world.size == 1:
            return None
        self._rolls, self._is_asked = [], True
        deadline = time.monotonic() + 10 * self._interval
        while len(self._rolls) < 4 and time.monotonic() < deadline:
            if self._is_alone:
                return self._describe([0])
            time.sleep(self._interval / 4)
        gone, _ = find_absent(self._rolls)
        return self._describe(gone) if gone else None

    def _tell(self) -> None:
        """Sign the roll and read it, again and again."""
        count = 0
        names = [f"life/{rank}" for rank in range(self._world.size)]
        try:
            store = open_store(self._world, timedelta(seconds=10 * self._interval + 5))
            self._hosts = store.multi_get([f"host/{rank}" for rank in range(self._world.size)])
            while not self._over.wait(self._interval):
                count += 1
                store.set(f"life/{self._world.rank}", f"{count} {self._place}")
                store.check(names[:1])  # an answer, or an error, where setting gives none
                # All ranks reading all signs all the time would be too much for the store.
                if self._is_asked or self._waited() > self._timeout / 2:
                    self._rolls = [*self._rolls[-3:], store.multi_get(names)]
                self._answered = time.monotonic()
            store.set(f"life/{self._world.rank}", LEFT.decode())
        except FAILED:
            self._is_alone = True

    def _judge(self) -> None:
        while not self._over.wait(self._interval):
            if self._waited() < self._timeout:
                continue
            if time.monotonic() - self._answered > 5 * self._interval:
                self._finish(self._describe([0]))
            gone, behind = find_absent(self._rolls)
            if gone or behind:
                self._finish(self._describe(gone or behind))

    def _waited(self) -> float:
        """Seconds since the training last came further."""
        return time.monotonic() - self._since

    def _finish(self, missing: str) -> None:
        if not self._over.is_set():
            # The others read the roll that rank 0 keeps.
            time.sleep(4 * self._interval if self._world.rank == 0 else 0)
            end_hung_run(
                self._world,
                self._output,
                f"{missing}: missing for {self._timeout / 60:g} min (--timeout-minutes); "
                "saved checkpoints are untouched",
            )

    def _describe(self, ranks: list[int]) -> str:
        hosts = {self._hosts[rank].decode() for rank in ranks} if self._hosts else set()
        return list_ranks(ranks) + (f" on {', '.join(sorted(hosts))}" if hosts else "")


def find_absent(rolls: list[list[bytes]]) -> tuple[list[int], list[int]]:
    """Ranks that gave no sign between the first and the last of four rolls, and those behind."""
    if len(rolls) < 4:
        return [], []
    pairs = list(enumerate(zip(rolls[0], rolls[-1], strict=True)))
    gone = [rank for rank, (before, now) in pairs if before == now != LEFT]
    places = {rank: int(now.split()[1]) for rank, (_, now) in pairs if now != LEFT}
    furthest = max(places.values(), default=0)
    return gone, [rank for rank, place in places.items() if place < furthest]


def list_ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 3, 4, ... (12 in all)`."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
