"""Find out which ranks are missing: when a collective fails, and when a run hangs.

The ranks share a key-value store on rank 0. A thread of each rank regularly writes a counter and
the number of batches that the rank has read. A rank whose counter does not change is gone or
frozen; a rank that has read fewer batches delays the others. torch's own timeouts name no rank.

A rank whose device failed tells the others through the same store: they wait in a collective.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from albert_ds.runtime.environment import World
from albert_ds.runtime.rendezvous import list_ranks, open_store

INTERVAL = 1.0  # seconds between two heartbeats; a fifth of the timeout if that is less
FAILED = (RuntimeError, ValueError)  # raised by a store whose host is gone (DistError too)
LEFT = b"left"


class Heartbeat:
    """Watches all ranks; calls `on_hang` with the reason, from a thread, when the run hangs.

    `on_hang` ends the process. It also takes the exit code, where another rank has named one.
    """

    def __init__(self, world: World, *, on_hang: Callable[..., None], minutes: float):
        self._world, self._on_hang, self._timeout = world, on_hang, 60 * minutes
        self._interval = min(INTERVAL, self._timeout / 5)
        self._place, self._since = 0, time.monotonic()
        self._answered = time.monotonic()  # last answer of the store
        self._is_asked = False  # the main thread waits for `name_missing`
        self._is_alone = False  # rank 0 is gone, and the store with it
        self._hosts: list[bytes] = []
        self._rolls: list[list[bytes]] = []  # all ranks' heartbeats, the last four readings
        self._failure = ""  # JSON of code and reason, where this rank fails
        self._over = threading.Event()
        if world.size > 1:
            for work in (self._tell, self._judge):
                threading.Thread(target=work, daemon=True).start()

    def follow(self, batches: Iterator) -> Iterator:
        """The same micro-batches, counted."""
        for batch in batches:
            self._place += 1
            self._since = time.monotonic()
            yield batch

    def close(self) -> None:
        """Tell the others that this rank leaves in good order; call it before leaving."""
        self._over.set()

    def name_missing(self) -> str | None:
        """After a failed collective: the ranks that are gone, None if that is unknown."""
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

    def end_all(self, code: int, reason: str) -> None:
        """End this process and all other ranks with `code`; returns where there is one rank."""
        if self._world.size == 1:
            return
        reason = f"rank {self._world.rank}: {reason}"
        self._failure = json.dumps([code, reason])
        deadline = time.monotonic() + 10 * self._interval
        while self._failure and not self._is_alone and time.monotonic() < deadline:
            time.sleep(self._interval / 4)
        self._on_hang(reason, code=code)

    def _tell(self) -> None:
        """Write this rank's heartbeat regularly; read those of the others when needed."""
        count = 0
        names = [f"life/{rank}" for rank in range(self._world.size)]
        try:
            store = open_store(self._world, timedelta(seconds=10 * self._interval + 5))
            self._hosts = store.multi_get([f"host/{rank}" for rank in range(self._world.size)])
            while not self._over.wait(self._interval):
                count += 1
                store.set(f"life/{self._world.rank}", f"{count} {self._place}")
                if self._failure:
                    store.set("failure", self._failure)
                    told = [f"told/{r}" for r in range(self._world.size) if r != self._world.rank]
                    store.wait(told, timedelta(seconds=8 * self._interval))
                    self._failure = ""
                    return
                # `set` does not wait for an answer, `check` does.
                if store.check(["failure"]):
                    code, reason = json.loads(store.get("failure"))
                    store.set(f"told/{self._world.rank}", "")
                    self._on_hang(reason, code=code)
                # If all ranks always read all heartbeats, the store would be overloaded.
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
        """Seconds since the last micro-batch was taken."""
        return time.monotonic() - self._since

    def _finish(self, missing: str) -> None:
        if not self._over.is_set():
            # The other ranks need the store of rank 0 a little longer.
            time.sleep(4 * self._interval if self._world.rank == 0 else 0)
            self._on_hang(
                f"{missing}: missing for {self._timeout / 60:g} min (--timeout-minutes); "
                "saved checkpoints are untouched",
            )

    def _describe(self, ranks: list[int]) -> str:
        hosts = {self._hosts[rank].decode() for rank in ranks} if self._hosts else set()
        return list_ranks(ranks) + (f" on {', '.join(sorted(hosts))}" if hosts else "")


def find_absent(rolls: list[list[bytes]]) -> tuple[list[int], list[int]]:
    """Ranks without a heartbeat from the first to the last of four readings, and ranks behind."""
    if len(rolls) < 4:
        return [], []
    pairs = list(enumerate(zip(rolls[0], rolls[-1], strict=True)))
    gone = [rank for rank, (before, now) in pairs if before == now != LEFT]
    places = {rank: int(now.split()[1]) for rank, (_, now) in pairs if now != LEFT}
    furthest = max(places.values(), default=0)
    return gone, [rank for rank, place in places.items() if place < furthest]
