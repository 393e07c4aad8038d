"""The collectives of an optimizer step, and what each sends over the wire.

A ring: of an all-reduce a rank sends 2 (n - 1) / n of the tensor, of a gather or a reduce-scatter
(n - 1) / n. What DeepSpeed does at each ZeRO stage is what tools/comm_volume.py counts and
ds_configs/README.md states; a test holds this list to those counts.
"""

import math
from dataclasses import dataclass

from albert_ds.scaling.layout import Layout

GRADIENTS, WEIGHTS = "gradients", "weights"
ACTIVATIONS, SMALL = "tensor-parallel activations", "norms, flags and counts"
SMALL_CALLS, SMALL_BYTES = 4, 512  # of a step, whatever the layout: counts, norm, LAMB's sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """All calls of one kind in one optimizer step."""

    kind: str
    calls: int
    bytes: float  # of the whole tensors, all calls together
    turns: int  # 2 for an all-reduce, else 1
    ranks: int  # that take part
    crosses_nodes: bool
    rings: int  # groups that do the same at once and share a node's link

    @property
    def wire_bytes(self) -> float:
        """Sent by one rank."""
        return self.turns * self.bytes * (self.ranks - 1) / self.ranks

    @property
    def hops(self) -> int:
        """Messages that wait for one another: the depth of a tree, up and down."""
        return self.calls * self.turns * math.ceil(math.log2(self.ranks))


def count_collectives(layout: Layout) -> list[Collective]:
    """What one rank takes part in, without what a single rank would do alone."""
    found = [*_data_parallel(layout), *_tensor_parallel(layout)]
    if layout.ranks > 1:
        found.append(
            Collective(
                kind=SMALL,
                calls=SMALL_CALLS,
                bytes=SMALL_CALLS * SMALL_BYTES,
                turns=2,
                ranks=layout.ranks,
                crosses_nodes=layout.nodes > 1,
                rings=1,
            )
        )
    return [collective for collective in found if collective.ranks > 1]


def _data_parallel(layout: Layout) -> list[Collective]:
    passes = layout.accumulation

    def over_replicas(kind: str, times: int, calls: int, width: int, turns: int) -> Collective:
        return Collective(
            kind=kind,
            calls=times * calls,
            bytes=times * width * layout.parameters,
            turns=turns,
            ranks=layout.data_parallel,
            crosses_nodes=layout.nodes > 1,
            rings=min(layout.tensor_parallel, layout.ranks_a_node),
        )

    reductions = passes if layout.zero >= 2 else 1
    gathers = {0: 0, 1: 1, 2: 1, 3: passes}[layout.zero]
    # At ZeRO-1 and 2 DeepSpeed all-reduces, where a reduce-scatter would do. It gathers what has
    # weight decay and what has none apart.
    turns = 1 if layout.zero == 3 else 2
    return [
        over_replicas(GRADIENTS, reductions, 1, layout.gradient_bytes, turns),
        over_replicas(WEIGHTS, gathers, 2, layout.weight_bytes, 1),
    ]


def _tensor_parallel(layout: Layout) -> list[Collective]:
    layers = layout.model.num_layers
    calls = 4 * layers * layout.accumulation  # 2 forward, 2 backward a layer
    # But for the gradient of its input, the last layer's are of the tokens that are read.
    rows = (4 * layers - 3) * layout.tokens_a_pass + 3 * layout.read_a_pass
    return [
        Collective(
            kind=ACTIVATIONS,
            calls=calls,
            bytes=layout.accumulation * rows * layout.model.hidden_size * layout.weight_bytes,
            turns=2,
            ranks=layout.tensor_parallel,
            crosses_nodes=layout.tensor_parallel > layout.ranks_a_node,
            rings=1,
        )
    ]
