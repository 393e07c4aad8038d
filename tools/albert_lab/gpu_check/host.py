"""What the host does to a step on real text: sources of micro-batches, and settings of the host.

The same micro-batch repeated shows no effect of changing shapes, a list none of a loader, a list
seen before none of shapes that are new. Each setting is taken back after its turn.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from unittest.mock import patch

import torch

from albert_ds.data import micro_batch
from albert_ds.data.micro_batch import MicroBatch
from albert_ds.engine.graphs import Graphs
from albert_ds.training.pretrain import Run, next_batch, open_stream, run_passes, update
from albert_lab.gpu_check.records import Records
from albert_lab.gpu_check.steps import Bench, profile_host
from albert_lab.host_time import Clock, in_ms
from albert_lab.measurement import open_sources

SECONDS = 1.4  # of steps that a turn times
LEAST, MOST = 8, 40  # of these steps
FRESH = 40  # micro-batches of a list: no more are taken in a turn of steps of 0.1 s

# (micro-batch, source, settings): the most telling turns first. Kernels are launched one by one if
# "graphs" is not among the settings. The first turn is taken again, to show the machine's drift.
AS_IS = ()
ALL = ("gc off", "1 thread", "switch 0.1 ms", "pinned by main")
TURNS = [
    (64, "loader", AS_IS),
    (64, "repeated", AS_IS),
    (64, "list", AS_IS),
    (64, "list again", AS_IS),
    (64, "loader", ("gc off",)),
    (64, "loader", ("pinned by main", "1 thread")),
    (64, "loader", ("switch 0.1 ms",)),
    (64, "loader", ALL),
    (64, "loader", ("graphs",)),
    (64, "loader", ("graphs", *ALL)),
    (64, "loader", ("1 thread",)),
    (128, "loader", AS_IS),
    (64, "loader", AS_IS),
    (64, "loader", ("pinned by main",)),
    (64, "loader", ("ordinary memory",)),
    (128, "loader", ("graphs",)),
]
EAGER = "all kernels loaded at the start"  # by the environment, so in a process of its own
EAGER_TURNS = [(64, source, (EAGER,)) for source in ("loader", "list", "repeated")]


@contextmanager
def by_graphs(run: Run) -> Generator[None]:
    module = run.engine.deepspeed.module
    module.graphs = Graphs(module)
    try:
        yield
    finally:
        module.graphs = None


@contextmanager
def without_collections() -> Generator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextmanager
def one_thread() -> Generator[None]:
    """Of torch's operators on the host, in the thread that asks them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def switch_often() -> Generator[None]:
    """A thread that wants Python's lock asks for it after 0.1 ms, not after 5."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def send_as_it_is(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.to(device, non_blocking=True)


SETTINGS = {
    "gc off": without_collections,
    "1 thread": one_thread,
    "switch 0.1 ms": switch_often,
    "ordinary memory": partial(patch.object, micro_batch, "send", send_as_it_is),
}
UNPINNED = {"pinned by main", "ordinary memory"}  # settings without the loader's pinning thread


def measure_host(records: Records, quick: bool, data: str, *, eager: bool) -> None:
    """Turns of the size base on text, in one engine. eager: see EAGER; CUDA has not started."""
    turns = EAGER_TURNS if eager else TURNS
    if eager:
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    bench = Bench(quick)
    seconds = 0.1 if quick else SECONDS
    size, length = ("albert-tiny", 64) if quick else ("albert-base", 512)
    options = {"length": length, "data": data, "no_graphs": True}
    run = bench.open_run(size, 2 if quick else 64, "none", **options)
    lists = split_lists(run, 2 + sum(source == "list" for _, source, _ in turns))
    seen = next(lists)
    time_turn(run, cycle(seen), seconds=seconds)  # builds kernels, fills the allocator
    for micro, source, settings in turns:
        micro = micro // 32 if quick else micro
        facts = {"micro": micro, "rows": source, "settings": ", ".join(settings) or "as is"}
        work = partial(measure_turn, run, micro, source, settings, lists, seen, seconds)
        records.measure("host", work, needs=1 if quick else 4, **facts)
    if not eager:
        run.batches = cycle(seen)
        records.measure("operators of the host", partial(profile_host, run))


def split_lists(run: Run, number: int) -> Iterator[list[MicroBatch]]:
    """Lists of pinned micro-batches, read beforehand."""
    size = FRESH if run.config.micro_batch_size > 8 else 4
    stream = open_stream(run.config, open_sources(run.config), run.mesh, 10_000, run.device)
    made = list(islice(stream, number * size))
    return iter([made[i * size : (i + 1) * size] for i in range(number)])


def measure_turn(
    run: Run,
    micro: int,
    source: str,
    settings: tuple[str, ...],
    lists: Iterator[list[MicroBatch]],
    seen: list[MicroBatch],
    seconds: float,
) -> dict:
    before = run.config
    run.config = replace(before, micro_batch_size=micro, batch_size=2 * micro)
    try:
        with ExitStack() as stack:
            for setting in settings:
                if setting == "graphs":
                    stack.enter_context(by_graphs(run))
                if setting in SETTINGS:
                    stack.enter_context(SETTINGS[setting]())
            # A stream for a CPU has no pinning thread: `send` pins then.
            pins = run.device if UNPINNED.isdisjoint(settings) else torch.device("cpu")
            sources = open_sources(run.config)
            batches = {
                "repeated": lambda: cycle(seen[:1]),
                "list again": lambda: cycle(seen),
                "list": lambda: cycle(next(lists)),
                "loader": lambda: open_stream(run.config, sources, run.mesh, run.step, pins),
            }[source]()
            warm = 10 if "graphs" in settings else 3  # a graph is captured at a shape's second use
            return time_turn(run, batches, seconds=seconds, warm=warm)
    finally:
        run.batches = iter(())
        run.config = before


def time_turn(run: Run, batches: Iterator[MicroBatch], *, seconds: float, warm: int = 3) -> dict:
    """Steps in the order of the trainer's loop, which fetches the next while the device computes.

    A list has each micro-batch at most once in the steps that are timed, if there are enough.
    """
    run.batches = batches
    upcoming = next_batch(run)
    for _ in range(warm):  # the loader's workers start, and fill their queues
        upcoming, _ = take_step_of_loop(run, upcoming)
    torch.cuda.synchronize()
    clock = Clock()
    untimed, run.span = run.span, clock.span
    steps: list[float] = []
    tokens = 0
    with watch_collections() as pauses:
        threads = read_threads()
        cpu = time.process_time()
        ended = time.perf_counter()
        while len(steps) < LEAST or (sum(steps) < seconds and len(steps) < MOST):
            tokens += upcoming.counts.tokens
            upcoming, _ = take_step_of_loop(run, upcoming)
            begun = ended
            ended = time.perf_counter()
            steps.append(ended - begun)
        cpu = time.process_time() - cpu
        busy = read_threads() - threads
    torch.cuda.synchronize()
    run.span = untimed
    spent = clock.seconds
    passes = clock.passes()
    a_step = len(passes) // len(steps)
    firsts = passes[::a_step]  # of a step: the device waits for them, so the host never waits
    number = len(steps)
    return {
        "tokens_a_second": round(tokens / sum(steps)),
        "step_ms": in_ms(steps),
        "step_ms_p90": in_ms(steps, 90),
        "slowest_ms": in_ms(steps, 100),
        "host_ms": in_ms(firsts),
        "host_ms_p90": in_ms(firsts, 90),
        "forward_ms": in_ms(spent["forward"][::a_step]),
        "backward_ms": in_ms(spent["backward"][::a_step]),
        "later_host_ms": in_ms([ms for i, ms in enumerate(passes) if i % a_step] or firsts),
        "update_ms": in_ms(spent["optimizer"]),
        "data_ms": in_ms(spent["data_wait"]),
        "cpu_ms": round(1e3 * cpu / number, 2),
        "threads": len(threads),
        "torch_threads": torch.get_num_threads(),
        "busy_threads": {k: round(ms / number, 1) for k, ms in busy.most_common(6)},
        "collections": [len(pauses[i]) for i in range(3)],
        "collection_ms": round(1e3 * sum(map(sum, pauses.values())) / number, 2),
        "longest_collection_ms": in_ms(sum(pauses.values(), []) or [0], 100),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 3),
        "steps": number,
    }


def take_step_of_loop(run: Run, batch):
    run_passes(run, batch)
    upcoming = next_batch(run, ahead=1)
    return upcoming, update(run, batch)


@contextmanager
def watch_collections() -> Generator[dict[int, list[float]]]:
    """The seconds of Python's garbage collections, by generation."""
    pauses: dict[int, list[float]] = defaultdict(list)
    begun = 0.0

    def note(phase: str, info: dict) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.perf_counter()
        else:
            pauses[info["generation"]].append(time.perf_counter() - begun)

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


def read_threads() -> Counter:
    """CPU milliseconds of each thread of this process, by its name and number."""
    tick = 1e3 / os.sysconf("SC_CLK_TCK")
    python = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    times: Counter = Counter()
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        user, system = rest.split()[11:13]
        times[f"{python.get(task.name, name)} {task.name}"] = int(tick * (int(user) + int(system)))
    return times
