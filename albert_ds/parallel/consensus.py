"""Agreement of all ranks before a step, by one small all-reduce on the host.

It sums the counts that normalise the losses over the global batch, and tells all ranks whether one
of them was asked to stop or found damaged data. So every rank leaves at the same step, and none
waits for a rank that has left.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist

from albert_ds.base.errors import ENDINGS
from albert_ds.parallel.mesh import Mesh


@dataclass(kw_only=True, slots=True)
class Counts:
    """Sums over the micro-batches of a step: of one rank, or (from `agree`) of all ranks."""

    samples: int = 0
    tokens: int = 0
    squared_lengths: int = 0  # sum of squared sequence lengths, for attention's FLOPs
    masked: int = 0
    pairs: int = 0  # sequence pairs with a label
    unpaired: int = 0  # sequences whose label is ignored
    unused_tokens: int = 0  # stored tokens that a shortened sequence left out
    available: int = 0  # stored tokens of the sequences drawn
    words: int = 0

    @classmethod
    def of(cls, batch) -> "Counts":
        """Of one micro-batch."""
        lengths = batch.tensors["cu_seqlens"][: batch.samples + 1].diff().long()
        names = {field.name for field in fields(cls)} - {"squared_lengths"}
        counts = {name: getattr(batch, name) for name in names}
        return cls(squared_lengths=int(lengths.square().sum()), **counts)

    def __add__(self, other: "Counts") -> "Counts":
        left, right = asdict(self), asdict(other)
        return Counts(**{name: left[name] + right[name] for name in left})


def agree(
    mesh: Mesh, counts: Counts, *, stop: bool = False, error: Exception | None = None
) -> tuple[Counts, bool]:
    """Sum `counts` over data-parallel ranks; return the sums and whether any rank wants to stop.

    If a rank passes an error, it is raised on every rank. Collective over all ranks.
    """
    values = list(asdict(counts).values()) if mesh.tp_rank == 0 else [0] * len(fields(Counts))
    vector = torch.tensor([*values, stop, error is not None])
    dist.all_reduce(vector, group=mesh.control_group)
    *sums, stops, errors = vector.tolist()
    if errors:
        raise_first_error(mesh, error)
    names = [field.name for field in fields(Counts)]
    return Counts(**dict(zip(names, sums, strict=True))), bool(stops)


def raise_first_error(mesh: Mesh, error: Exception | None) -> None:
    """Raise the error of the lowest rank that has one, on every rank. Collective."""
    errors: list[Exception | None] = [None] * mesh.world_size
    dist.all_gather_object(errors, error, group=mesh.control_group)
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise first


@contextmanager
def raise_together(mesh: Mesh) -> Generator[None]:
    """Run a block in which ranks may do different things; if it fails on one, it fails on all.

    Every rank raises the error of the lowest rank that has one: an ending of errors.py or an
    OSError. Collective, at the end of the block.
    """
    error = None
    try:
        yield
    except (*ENDINGS, OSError) as caught:
        error = caught
    raise_first_error(mesh, error)


def from_rank_0(mesh: Mesh, value):
    """Broadcast rank 0's value. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=mesh.control_group)
    return box[0]


def gather_hosts(mesh: Mesh) -> list[str]:
    """The node of each rank. Collective."""
    hosts = [""] * mesh.world_size
    dist.all_gather_object(hosts, os.uname().nodename, group=mesh.control_group)
    return hosts
