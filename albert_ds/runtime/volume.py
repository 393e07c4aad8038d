"""What a step's collectives come to, by kind: gradients, weights, activations and small things.

On the wire means what a rank sends in a ring: of an all-reduce 2 (n - 1) / n of the tensor, of a
gather, a scatter or a reduction to one rank (n - 1) / n.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from albert_ds.parallel.mesh import Mesh
from albert_ds.runtime.clocks import Clock
from albert_ds.runtime.traffic import Event

GRADIENTS, WEIGHTS = "gradients", "weights"
ACTIVATIONS, SMALL = "tensor-parallel activations", "norms, flags and counts"
SMALL_BYTES = 1 << 13  # LAMB's two sums for each of a 24-layer BERT's matrices are 5 kB
SCALAR_BYTES = 64  # a norm or a flag over tensor-parallel peers


@dataclass(kw_only=True, slots=True)
class Volume:
    """What one kind of collective came to."""

    calls: int = 0
    bytes: int = 0  # of the full tensors
    wire: float = 0.0  # bytes that a rank sends
    seconds: float = 0.0  # from the call until it was done
    exposed_seconds: float = 0.0  # ... of which the step waited; the rest was hidden
    by: Counter[str] = field(default_factory=Counter)  # calls by collective

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)


def sum_up(events: Iterable[Event], mesh: Mesh, clock: Clock) -> dict[str, Volume]:
    """Volumes by kind. Collectives within one rank move nothing and are left out."""
    volumes: dict[str, Volume] = {}
    for event in events:
        size = group_size(event, mesh)
        if size == 1:
            continue
        volume = volumes.setdefault(kind_of(event, mesh), Volume())
        turns = 2 if event.collective == "all_reduce" else 1
        volume.calls += 1
        volume.bytes += event.bytes
        volume.wire += turns * event.bytes * (size - 1) / size
        # A future may tell of its end a moment after `wait` has returned.
        done = event.waits[-1][1] if event.done is None else event.done
        volume.seconds += clock.seconds(done) - clock.seconds(event.begun)
        volume.exposed_seconds += sum(
            clock.seconds(end) - clock.seconds(begun) for begun, end in event.waits
        )
        volume.by[event.collective] += 1
    return dict(sorted(volumes.items()))


def kind_of(event: Event, mesh: Mesh) -> str:
    if mesh.tp_size > 1 and event.group is mesh.tp_group and event.bytes > SCALAR_BYTES:
        return ACTIVATIONS
    if event.bytes <= SMALL_BYTES:
        return SMALL
    return WEIGHTS if event.collective.startswith("all_gather") else GRADIENTS


def group_size(event: Event, mesh: Mesh) -> int:
    import torch.distributed as dist

    return mesh.world_size if event.group is None else dist.get_world_size(event.group)
