"""One ending for all ranks, with its true cause: signs of life in the store where they connected.

A thread of each rank regularly writes a beat: a counter, and the ending that the rank has come to,
if any. Rank 0 reads all beats and decides how all end: `Monitor`. The others read what it has
decided, and whether it still beats. So a rank that waits in a collective for one that failed ends
too, within seconds, with the same code and the same cause.
"""

import faulthandler
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from albert_ds.base.errors import MachineFailed
from albert_ds.process.ending import UNTOUCHED, Ending, leave_process, print_ending
from albert_ds.process.quiet import name_log
from albert_ds.process.rendezvous import list_ranks, open_store
from albert_ds.process.world import World

INTERVAL_SECONDS = 1.0  # between two beats
PROMPT_SECONDS = 0.05  # between two beats of a rank that has come to its end
SILENCE_SECONDS = 30.0  # without a beat after which a rank counts as dead
LOST_SECONDS = 5.0  # the same after a collective has failed because a peer is gone
TOGETHER_SECONDS = 2.0  # in which all ranks come to an ending that is not one rank's alone
WRITING_SECONDS = 10.0  # in which rank 0 writes exit.json
FAILED = (RuntimeError, ValueError)  # raised by a store whose host is gone (DistError too)


class Beat(NamedTuple):
    """A sign of life of one rank; a list of JSON in the store."""

    count: int = 0
    ending: Ending | None = None  # what it has come to
    is_leaving: bool = False  # it knows how all ranks end

    @staticmethod
    def decode(text: bytes) -> "Beat":
        """What is no beat, which another program may have written, is no sign of life."""
        try:
            count, ending, is_leaving = json.loads(text)
            return Beat(count, Ending(*ending) if ending else None, is_leaving)
        except (ValueError, TypeError):
            return Beat()


class Monitor:
    """What rank 0 knows of all ranks, and how they end."""

    def __init__(self, run: Path, hosts: list[str], timeout: float):
        """hosts: of each rank. timeout: seconds that a rank may keep the others waiting."""
        self._run, self._hosts, self._timeout = run, hosts, timeout
        self._beats = [Beat()] * len(hosts)
        self._silent = [0.0] * len(hosts)  # seconds without a beat
        self._ended = 0.0  # seconds since a rank has come to its end

    def update(self, beats: list[Beat], elapsed: float) -> None:
        """Take in new beats, `elapsed` seconds after the last ones."""
        for rank, (before, now) in enumerate(zip(self._beats, beats, strict=True)):
            self._silent[rank] = self._silent[rank] + elapsed if now.count == before.count else 0
        self._ended += elapsed if any(beat.ending for beat in beats) else 0
        self._beats = beats

    def verdict(self) -> Ending | None:
        """How all ranks end; None while there is no reason to."""
        endings = {rank: beat.ending for rank, beat in enumerate(self._beats) if beat.ending}
        causes = {rank: ending for rank, ending in endings.items() if not ending.is_secondary}
        failures = [rank for rank, ending in causes.items() if not ending.is_orderly]
        if len(causes) == len(self._beats):
            return causes[failures[0] if failures else 0]
        if failures and self._ended > TOGETHER_SECONDS:
            code, reason, _ = causes[failures[0]]
            return Ending(code, f"{self._name(failures[:1])}: {reason}")
        # The collectives of a rank have failed, or a rank is done.
        secondary = next((e for e in endings.values() if e.is_secondary and not failures), None)
        allowed = LOST_SECONDS if secondary else min(SILENCE_SECONDS, self._timeout)
        patience = 2 * LOST_SECONDS if secondary else self._timeout
        if gone := [rank for rank, silent in enumerate(self._silent) if silent > allowed]:
            what = "is missing" if secondary else f"is missing: no sign of life for {allowed:g} s"
        elif endings and self._ended > patience:
            gone = [rank for rank in range(len(self._beats)) if rank not in endings]
            what = "keeps the others waiting"
        else:
            return None
        if secondary is None:
            reason = f"{self._name(gone)} {what}{UNTOUCHED}"
        elif gone:
            reason = secondary.reason.replace("a peer is missing", f"{self._name(gone)} {what}", 1)
        else:  # all have lost somebody
            return secondary
        return Ending(MachineFailed.code, f"{reason}{see_log(self._run, gone)}")

    def all_acknowledged(self) -> bool:
        """Whether every rank leaves, or is gone."""
        pairs = zip(self._beats[1:], self._silent[1:], strict=True)
        return all(beat.is_leaving or silent > LOST_SECONDS for beat, silent in pairs)

    def _name(self, ranks: list[int]) -> str:
        return f"{list_ranks(ranks)} on {', '.join(sorted({self._hosts[rank] for rank in ranks}))}"


class Heartbeat:
    """Watches all ranks; ends this process, from a thread, if its main thread cannot."""

    def __init__(
        self, world: World, run: Path, *, record: Callable[[Ending], None], minutes: float
    ):
        """record: writes exit.json. minutes: --timeout-minutes."""
        self._world = world
        self._run = run
        self._record = record
        self._timeout = 60 * minutes
        self._silence = min(SILENCE_SECONDS, self._timeout)
        self._count = 0
        self._host = "its machine"  # of rank 0
        self._own: Ending | None = None
        self._ending: Ending | None = None  # of all ranks
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._silent = 0.0  # seconds without a sign of rank 0
        for work in (self._watch, self._watch_rank_0) if world.size > 1 else ():
            threading.Thread(target=work, daemon=True).start()

    def end_together(self, own: Ending) -> Ending:
        """How all ranks end, if this one has come to `own`. exit.json is then written."""
        if self._world.size == 1:
            self._record(own)
            return own
        with self._lock:
            self._own = own
        self._wake.set()
        self._over.wait()
        assert self._ending is not None
        return self._ending

    def _watch(self) -> None:
        ending = None
        try:
            store = open_store(self._world, timedelta(seconds=self._silence))
            ending = self._run_rank_0(store) if self._world.rank == 0 else self._run_other(store)
        except FAILED:
            while self._world.has_store and self._own is None:
                self._silent = float("-inf")  # only the launcher is gone: it is asked to stop
                time.sleep(INTERVAL_SECONDS)
        self._finish(ending)

    def _watch_rank_0(self) -> None:
        """Ranks above 0: end if rank 0, which hosts the store, stops beating."""
        while self._world.rank > 0 and not self._over.wait(INTERVAL_SECONDS):
            self._silent += INTERVAL_SECONDS
            is_secondary = self._own is not None and self._own.is_secondary
            if self._silent > (LOST_SECONDS if is_secondary else self._silence):
                self._finish(None)

    def _finish(self, ending: Ending | None) -> None:
        """End with all ranks, or alone (None); whichever thread comes first decides."""
        with self._lock:  # the main thread cannot come to an ending any more
            self._ending = self._ending or ending or self._end_alone()
            if self._own is None:
                faulthandler.dump_traceback(2)  # where the main thread waits
                print_ending(self._world, self._ending)
                leave_process(self._ending.code)
        self._over.set()

    def _run_rank_0(self, store) -> Ending:
        """Watch all until there is an ending, write it down, wait until all have acknowledged."""
        names = [f"life/{rank}" for rank in range(self._world.size)]
        hosts = store.multi_get([f"host/{rank}" for rank in range(self._world.size)])
        monitor = Monitor(self._run, [host.decode() for host in hosts], self._timeout)
        ending = None
        until = 0.0
        for elapsed in self._beat(store):
            monitor.update([Beat.decode(life) for life in store.multi_get(names)], elapsed)
            if ending is None:
                ending = monitor.verdict()
                if ending is not None:
                    store.set("ending", json.dumps(ending))
                    self._record(ending)
                    store.set("written", "")
                    self._wake.set()
                    until = time.monotonic() + SILENCE_SECONDS
            elif monitor.all_acknowledged() or time.monotonic() > until:
                break
        assert ending is not None
        return ending

    def _run_other(self, store) -> Ending:
        """Ranks above 0: wait for rank 0's decision."""
        self._host = store.get("host/0").decode()
        last = b""
        for _ in self._beat(store):
            if store.check(["ending"]):
                break
            life = store.get("life/0")
            if life != last:
                self._silent = 0.0
                last = life
        ending = Ending(*json.loads(store.get("ending")))
        with suppress(*FAILED):
            store.wait(["written"], timedelta(seconds=WRITING_SECONDS))
            store.set(f"life/{self._world.rank}", json.dumps(Beat(is_leaving=True)))
            store.check(["ending"])  # `set` does not wait for an answer
        return ending

    def _beat(self, store) -> Iterator[float]:
        """Write beats for ever; yields the seconds since the last.

        A process that was stopped and goes on has not watched the others, so its pause counts as
        two intervals.
        """
        before = time.monotonic()
        while True:
            self._count += 1
            beat = Beat(count=self._count, ending=self._own)
            store.set(f"life/{self._world.rank}", json.dumps(beat))
            now = time.monotonic()
            yield min(now - before, 2 * INTERVAL_SECONDS)
            before = now
            self._wake.wait(INTERVAL_SECONDS)
            time.sleep(PROMPT_SECONDS)

    def _end_alone(self) -> Ending:
        """The ending of a rank that can no longer hear rank 0."""
        own = self._own
        # Where the launcher hosts the store, only that is gone, and all ranks end as this one.
        if own is None or own.is_secondary or (own.is_orderly and not self._world.has_store):
            reason = own.reason if own and own.is_secondary else f"a peer is missing{UNTOUCHED}"
            reason = reason.replace("a peer", f"rank 0 on {self._host}", 1)
            reason += see_log(self._run, [0])
            own = Ending(MachineFailed.code, reason, is_secondary=True)
        self._record(own)
        return own


def see_log(run: Path, ranks: list[int]) -> str:
    return f"; native messages: {name_log(run, ranks)}"
