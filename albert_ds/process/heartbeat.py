"""One ending for all ranks, with its true cause: signs of life in the store where the ranks met.

A thread of each rank regularly writes a beat: a counter, how many batches the rank has taken, and
the ending that it has come to, if any. Rank 0 reads all beats and decides how all end: `Judge`.
The others read what it has decided, and whether it still beats. So a rank that waits in a
collective for one that failed ends too, within seconds, with the same code and the same cause.
"""

import faulthandler
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from albert_ds.errors import MachineFailed
from albert_ds.process.ending import UNTOUCHED, Ending, leave_process, say
from albert_ds.process.native_log import name_log
from albert_ds.process.rendezvous import list_ranks, open_store
from albert_ds.process.world import World

INTERVAL = 1.0  # seconds between two beats
PROMPT = 0.05  # seconds between two beats of a rank that has come to its end
SILENCE = 30.0  # seconds without a beat after which a rank counts as dead
LOST = 5.0  # the same after a collective has failed because a peer is gone
TOGETHER = 2.0  # seconds in which all ranks come to an ending that is not one rank's alone
WRITING = 10.0  # seconds in which rank 0 writes exit.json
FAILED = (RuntimeError, ValueError)  # raised by a store whose host is gone (DistError too)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A sign of life of one rank."""

    count: int = 0
    batches: int = 0  # micro-batches taken
    is_reading: bool = False  # it waits for the next one
    ending: Ending | None = None  # what it has come to
    has_heard: bool = False  # it knows how all ranks end, and leaves

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes) -> "Beat":
        values = json.loads(text)
        ending = values.pop("ending", None)
        return Beat(**values, ending=Ending(*ending) if ending else None)


class Judge:
    """What rank 0 knows of all ranks, and how they end."""

    def __init__(self, run: Path, hosts: list[str], timeout: float):
        """hosts: of each rank. timeout: seconds that a rank may be behind the others."""
        self._run, size = run, len(hosts)
        self._hosts, self._timeout, self._silence = hosts, timeout, min(SILENCE, timeout)
        self._beats = [Beat()] * size
        self._silent = [0.0] * size  # seconds without a beat
        self._reading = [0.0] * size  # seconds of waiting for a batch
        self._still = 0.0  # seconds in which no rank took a batch or came to its end
        self._known = 0.0  # seconds since a rank has come to its end

    def see(self, beats: list[Beat], elapsed: float) -> None:
        """Take in new beats, `elapsed` seconds after the last ones."""
        still = True
        for rank, (before, now) in enumerate(zip(self._beats, beats, strict=True)):
            moved = (before.batches, before.ending) != (now.batches, now.ending)
            silent = self._silent[rank] + elapsed
            if now.count == before.count:  # it may have frozen: that is no waiting for data
                self._silent[rank] = silent
                continue
            is_stuck = now.is_reading and not moved
            self._reading[rank] = self._reading[rank] + silent if is_stuck else 0
            self._silent[rank] = 0
            still = still and not moved
        self._still = self._still + elapsed if still else 0
        self._known += elapsed if any(beat.ending for beat in beats) else 0
        self._beats = beats

    def decide(self) -> Ending | None:
        """How all ranks end; None while there is no reason to."""
        return self._judge_endings() or self._judge_signs()

    def all_know(self) -> bool:
        """Whether every rank leaves, or is gone."""
        pairs = zip(self._beats[1:], self._silent[1:], strict=True)
        return all(beat.has_heard or silent > LOST for beat, silent in pairs)

    def _judge_endings(self) -> Ending | None:
        endings = {rank: beat.ending for rank, beat in enumerate(self._beats) if beat.ending}
        causes = {rank: ending for rank, ending in endings.items() if not ending.is_lost}
        failures = [rank for rank, ending in causes.items() if not ending.is_orderly]
        if len(causes) == len(self._beats):
            return causes[failures[0] if failures else 0]
        if failures and self._known > TOGETHER:
            code, reason, _ = causes[failures[0]]
            return Ending(code, f"{self._name(failures[:1])}: {reason}")
        lost = [ending for ending in endings.values() if ending.is_lost]
        if not lost or failures:
            return None
        gone = [rank for rank, silent in enumerate(self._silent) if silent > LOST]
        if gone:
            reason = lost[0].reason.replace("a peer", self._name(gone), 1)
            return lost[0]._replace(reason=f"{reason}{see_log(self._run, gone)}")
        return lost[0] if self._known > 2 * LOST else None

    def _judge_signs(self) -> Ending | None:
        most = max(beat.batches for beat in self._beats)
        has_ended = any(beat.ending for beat in self._beats)
        limit = f"{self._timeout / 60:g} min (--timeout-minutes)"
        if gone := [rank for rank, silent in enumerate(self._silent) if silent > self._silence]:
            what = f"is missing: no sign of life for {self._silence:g} s"
        elif gone := [rank for rank, read in enumerate(self._reading) if read > self._timeout]:
            what = f"has waited {limit} for data"
        elif self._still > self._timeout:
            gone = [
                rank
                for rank, beat in enumerate(self._beats)
                if beat.batches < most or (has_ended and not beat.ending)
            ]
            what = f"is behind the others for {limit}"
        if not gone:
            return None
        reason = f"{self._name(gone)} {what}{UNTOUCHED}{see_log(self._run, gone)}"
        return Ending(MachineFailed.code, reason)

    def _name(self, ranks: list[int]) -> str:
        return f"{list_ranks(ranks)} on {', '.join(sorted({self._hosts[rank] for rank in ranks}))}"


class Heartbeat:
    """Watches all ranks; ends this process, from a thread, where its main thread cannot."""

    def __init__(
        self, world: World, run: Path, *, record: Callable[[Ending], None], minutes: float
    ):
        """record: writes exit.json. minutes: --timeout-minutes."""
        self._world, self._run, self._record, self._timeout = world, run, record, 60 * minutes
        self._silence = min(SILENCE, self._timeout)
        self._count = self._batches = 0
        self._host = "its machine"  # of rank 0
        self._is_reading = False
        self._mine: Ending | None = None
        self._ending: Ending | None = None  # of all ranks
        self._lock, self._wake, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._silent = 0.0  # seconds without a sign of rank 0
        for work in (self._watch, self._guard) if world.size > 1 else ():
            threading.Thread(target=work, daemon=True).start()

    def follow(self, batches: Iterator) -> Iterator:
        """The same micro-batches, counted."""
        self._is_reading = True
        for batch in batches:
            self._is_reading = False
            self._batches += 1
            yield batch
            self._is_reading = True

    def settle(self, mine: Ending) -> Ending:
        """How all ranks end, where this one has come to `mine`. exit.json is then written."""
        if self._world.size == 1:
            self._record(mine)
            return mine
        with self._lock:
            self._mine = mine
        self._wake.set()
        self._over.wait()
        assert self._ending is not None
        return self._ending

    def _watch(self) -> None:
        try:
            store = open_store(self._world, timedelta(seconds=self._silence))
            ending = self._lead(store) if self._world.rank == 0 else self._obey(store)
        except FAILED:
            while self._world.has_store and self._mine is None:
                self._silent = float("-inf")  # only the launcher is gone: it is asked to stop
                time.sleep(INTERVAL)
            ending = self._end_alone()
        self._finish(ending)

    def _guard(self) -> None:
        """Of ranks above 0: end where rank 0 is frozen, and with it the store and `_obey`."""
        while self._world.rank > 0 and not self._over.wait(INTERVAL):
            self._silent += INTERVAL
            is_lost = self._mine is not None and self._mine.is_lost
            if self._silent > (LOST if is_lost else self._silence):
                self._finish(self._end_alone())

    def _finish(self, ending: Ending) -> None:
        with self._lock:  # the main thread cannot settle any more
            self._ending = self._ending or ending
            if self._mine is None:
                faulthandler.dump_traceback(2)  # where the main thread waits
                say(self._world, ending)
                leave_process(ending.code)
        self._over.set()

    def _lead(self, store) -> Ending:
        """Of rank 0: judge until there is an ending, write it down, wait until all have heard."""
        names = [f"life/{rank}" for rank in range(self._world.size)]
        hosts = store.multi_get([f"host/{rank}" for rank in range(self._world.size)])
        judge = Judge(self._run, [host.decode() for host in hosts], self._timeout)
        ending, heard_by = None, 0.0
        for elapsed in self._beat(store):
            judge.see([Beat.decode(life) for life in store.multi_get(names)], elapsed)
            if ending is None:
                ending = judge.decide()
                if ending is not None:
                    store.set("ending", json.dumps(ending))
                    self._record(ending)
                    store.set("written", "")
                    self._wake.set()
                    heard_by = time.monotonic() + SILENCE
            elif judge.all_know() or time.monotonic() > heard_by:
                break
        assert ending is not None
        return ending

    def _obey(self, store) -> Ending:
        """Of the other ranks: wait for rank 0's decision."""
        self._host = store.get("host/0").decode()
        last = b""
        for _ in self._beat(store):
            if store.check(["ending"]):
                break
            life = store.get("life/0")
            if life != last:
                self._silent, last = 0.0, life
        ending = Ending(*json.loads(store.get("ending")))
        with suppress(*FAILED):
            store.wait(["written"], timedelta(seconds=WRITING))
            store.set(f"life/{self._world.rank}", Beat(has_heard=True).encode())
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
            beat = Beat(
                count=self._count,
                batches=self._batches,
                is_reading=self._is_reading,
                ending=self._mine,
            )
            store.set(f"life/{self._world.rank}", beat.encode())
            now = time.monotonic()
            yield min(now - before, 2 * INTERVAL)
            before = now
            self._wake.wait(INTERVAL)
            time.sleep(PROMPT)

    def _end_alone(self) -> Ending:
        """The ending of a rank that can no longer hear rank 0."""
        mine = self._mine
        if mine is None or mine.is_lost or mine.is_orderly:
            reason = mine.reason if mine and mine.is_lost else f"a peer is missing{UNTOUCHED}"
            reason = reason.replace("a peer", f"rank 0 on {self._host}", 1)
            reason += see_log(self._run, [0])
            mine = Ending(MachineFailed.code, reason, is_lost=True)
        self._record(mine)
        return mine


def see_log(run: Path, ranks: list[int]) -> str:
    return f"; native messages: {name_log(run, ranks)}"
