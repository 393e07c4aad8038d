"""The endless stream of training samples, and the finite one of held-out samples.

    positions of this rank -> ranges of a micro-batch -> (every W-th to each of W workers) ->
    sequence from its shard -> pair of segments -> masked -> concatenated

The stages are a WebDataset pipeline. Its records are found by position, not read in the order of
the file, so the stream can start anywhere, which WebDataset's own readers cannot.
The position in the stream is one integer, the number of samples before it. A sample is drawn from
(seed, source, epoch, number in the source) and depends on nothing else: the number of ranks, the
number of workers and an interruption change no sample.
"""

import functools
import gc
import itertools
import math
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator

from webdataset import compat, pipeline, shardlists

from albert_ds.base.errors import ENDINGS, UserError
from albert_ds.data.micro_batch import MicroBatch, collate
from albert_ds.data.samples import SampleReader
from albert_ds.data.shards import ShardSet
from albert_ds.data.stream_config import DataPlan, StreamConfig, gradient_accumulation_steps

SHARED_MEMORY = "/dev/shm"
BYTES_A_TOKEN = 40  # of a micro-batch: four 64-bit numbers, and two for each masked token
MAX_PREFETCH = 16  # micro-batches that a worker is ahead

# A worker must not free what its trainer has dropped. The end of a process group waits for threads
# that a fork leaves behind: the worker hung, or died of a segmentation fault.
os.register_at_fork(after_in_child=gc.freeze)


def training_batches(
    sources: list[ShardSet],
    weights: list[float] | None,
    plan: DataPlan,
    *,
    step: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int = 0,
    timeout: float = 0,
    pin_memory: bool = False,
    fixed_shapes: bool = False,
) -> Iterator[MicroBatch]:
    """The micro-batches of one data-parallel rank after `step` finished steps, without end.

    Each step of n samples gives every rank n / dp_size of them, in micro-batches of
    `micro_batch_size`. `weights` are the shares of the sources; with None the shares follow the
    sources' sizes. Raises DamagedData for a damaged shard, and RuntimeError if a worker gives no
    micro-batch for `timeout` seconds (0: wait for ever). `pin_memory` pins what workers make, in a
    thread: a micro-batch of 64 x 512 tokens took 2 to 4 ms of the host (H200), which then launched
    no kernel. `fixed_shapes` makes micro-batches of few shapes (`data/fixed_shapes.py`).
    """
    sizes = plan.schedule("batch_size").values
    assert step >= 0 and not any(size % (dp_size * micro_batch_size) for size in sizes)
    reader = MicroBatchReader(sources, weights, plan.stream, fixed=fixed_shapes)
    cuts = functools.partial(plan_training, plan, step, micro_batch_size, dp_rank, dp_size)
    read = functools.partial(itertools.starmap, reader.read)
    batches = pipeline.DataPipeline(cuts, shardlists.split_by_worker, read)
    if not num_workers:
        return iter(batches)
    batches.append(_carry_endings)
    # A micro-batch from a worker is a file descriptor until its step is done.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A step takes its micro-batches at once; meanwhile the workers make those of the next step.
    accumulation = gradient_accumulation_steps(max(sizes), micro_batch_size, dp_size)
    prefetch = min(math.ceil(2 * accumulation / num_workers), MAX_PREFETCH)
    length = max(plan.schedule("sequence_length").values)
    check_shared_memory(num_workers, num_workers * prefetch * micro_batch_size * length)
    loader = compat.WebLoader(
        batches,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch,
        timeout=timeout,
        pin_memory=pin_memory,
        worker_init_fn=_obey_trainer_only,
    )
    return _raise_endings(loader)


def check_shared_memory(num_workers: int, tokens: int) -> None:
    """Raise UserError if so many tokens of workers do not fit /dev/shm, where they would wait.

    Containers have 64 MB there.
    """
    needed = tokens * BYTES_A_TOKEN
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        raise UserError(
            f"--num-workers {num_workers}: their micro-batches need {needed / 1e6:,.1f} MB of "
            f"{SHARED_MEMORY}, which has {free / 1e6:,.1f} free; allowed: fewer workers or 0, or "
            "more of it (docker run --shm-size 1g)"
        )


def heldout_batches(
    source: ShardSet,
    config: StreamConfig,
    *,
    limit: int,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    fixed_shapes: bool = False,
) -> Iterator[MicroBatch]:
    """One rank's part of the first `limit` samples of a split, with the same masks at every call.

    Every rank gets the same number of micro-batches; a rank without samples left gets dummies,
    with `samples` 0.
    """
    reader = MicroBatchReader([source], None, config, fixed=fixed_shapes)
    samples = min(limit, int(source.sizes.sum()))
    positions = range(dp_rank, samples, dp_size)
    most = len(range(0, samples, dp_size))  # samples of rank 0, which has the most
    for begin in range(0, most, micro_batch_size):
        yield reader.read(positions[begin : begin + micro_batch_size])


def plan_training(
    plan: DataPlan, step: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[tuple[range, StreamConfig]]:
    """The positions of each micro-batch of one rank, every dp_size-th of a step; their draws."""
    for at in itertools.count(step):
        positions, config = plan.batch_at(at)
        own = positions[dp_rank::dp_size]
        for i in range(0, len(own), micro_batch_size):
            yield own[i : i + micro_batch_size], config


def _obey_trainer_only(worker: int) -> None:
    """In a new worker process: only the trainer's own SIGTERM ends it.

    Slurm sends SIGTERM to every process of a job at once. The trainer still needs its workers for
    the step after which it stops; torch's workers would end at once, and the trainer with them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_sigterm_of, args=(os.getppid(),), daemon=True).start()


def _await_sigterm_of(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)


def _carry_endings(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch | Exception]:
    """In a worker: yield an error that ends the run; the loader would add a traceback to it."""
    try:
        yield from batches
    except ENDINGS as ending:
        yield ending


def _raise_endings(batches: Iterable[MicroBatch | Exception]) -> Iterator[MicroBatch]:
    for batch in batches:
        if isinstance(batch, Exception):
            raise batch
        yield batch


class MicroBatchReader(SampleReader):
    """Makes micro-batches from any positions of the stream; `fixed`: of few shapes."""

    def __init__(
        self,
        sources: list[ShardSet],
        weights: list[float] | None,
        config: StreamConfig,
        *,
        fixed: bool = False,
    ):
        super().__init__(sources, weights, config)
        self._fixed = fixed

    def read(self, positions: range, config: StreamConfig | None = None) -> MicroBatch:
        """The micro-batch of the samples at `positions` of the stream."""
        samples = [self.draw(position, config) for position in positions]
        return collate(samples, list(positions), config or self._config, fixed=self._fixed)
