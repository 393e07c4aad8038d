"""Micro-batches from worker processes, in the order in which one process would make them."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from albert_ds.errors import ENDINGS


class _Share(IterableDataset):
    """The items of one worker: worker w of W makes number w, w + W, w + 2 W, ..."""

    def __init__(self, plan: Callable[[], Iterator], make: Callable[[Any], Any]):
        self.plan = plan
        self.make = make

    def __iter__(self) -> Iterator:
        worker = get_worker_info()
        assert worker is not None
        try:
            for item in itertools.islice(self.plan(), worker.id, None, worker.num_workers):
                yield self.make(item)
        except ENDINGS as ending:
            yield ending  # raised over there: a DataLoader would add a traceback to its message


def make_in_workers(
    plan: Callable[[], Iterator], make: Callable[[Any], Any], num_workers: int
) -> Iterator:
    """`map(make, plan())` by `num_workers` processes, each of which calls `plan` itself."""
    loader = DataLoader(_Share(plan, make), batch_size=None, num_workers=num_workers)
    for item in loader:
        if isinstance(item, ENDINGS):
            raise item
        yield item
