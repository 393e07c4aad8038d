"""What all ranks must know before a step: one small all-reduce on the host.

It carries the counts that normalise the losses over the global batch, the wish of any rank to
stop, and the news that some rank found damaged data, so that every rank leaves at the same step and
none waits for one that has gone.
"""

from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist

from albert_ds.parallel.mesh import Mesh


@dataclass(kw_only=True, slots=True)
class Counts:
    """Sums over one step's micro-batches; over all data-parallel ranks once agreed."""

    samples: int = 0
    tokens: int = 0
    squared_lengths: int = 0  # sum of squared sequence lengths: what attention computes
    masked: int = 0
    pairs: int = 0  # sequence pairs with a label
    unpaired: int = 0  # sequences whose label is ignored
    set_aside: int = 0  # stored tokens that a short draw left out
    available: int = 0  # stored tokens of the sequences drawn

    @classmethod
    def of(cls, batch) -> "Counts":
        """Of one micro-batch."""
        lengths = batch.tensors["cu_seqlens"].diff().long()
        return cls(
            samples=batch.samples,
            tokens=batch.tokens,
            squared_lengths=int(lengths.square().sum()),
            masked=batch.masked,
            pairs=batch.pairs,
            unpaired=batch.unpaired,
            set_aside=batch.set_aside,
            available=batch.available,
        )

    def __add__(self, other: "Counts") -> "Counts":
        mine, theirs = asdict(self), asdict(other)
        return Counts(**{name: mine[name] + theirs[name] for name in mine})


def agree(
    mesh: Mesh, counts: Counts, *, stop: bool = False, error: Exception | None = None
) -> tuple[Counts, bool]:
    """Sum `counts` over data-parallel ranks and learn whether any rank wants to stop.

    Raises on every rank the error that any one of them passes. Collective over all ranks.
    """
    mine = list(asdict(counts).values()) if mesh.tp_rank == 0 else [0] * len(fields(Counts))
    vector = torch.tensor([*mine, stop, error is not None])
    dist.all_reduce(vector, group=mesh.control_group)
    *sums, stops, errors = vector.tolist()
    if errors:
        raise_first(mesh, error)
    names = [field.name for field in fields(Counts)]
    return Counts(**dict(zip(names, sums, strict=True))), bool(stops)


def raise_first(mesh: Mesh, error: Exception | None) -> None:
    """Raise the first rank's error on every rank; return where none has one. Collective."""
    errors: list[Exception | None] = [None] * mesh.world_size
    dist.all_gather_object(errors, error, group=mesh.control_group)
    found = next((e for e in errors if e is not None), None)
    if found is not None:
        raise found


def from_rank_0(mesh: Mesh, value):
    """Rank 0's value, on every rank. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=mesh.control_group)
    return box[0]
