"""The collectives of an optimizer step, and the bytes that each sends over the wire.

tools/comm_volume.py counts what DeepSpeed does at each ZeRO stage, docs/deepspeed.md states it,
and a test compares this list with those counts.
"""

import math
from dataclasses import dataclass

from albert_ds.engine.deepspeed_config import count_reductions
from albert_lab.scaling.layout import CHECKPOINTING, Layout

# Kinds of collectives; `kinds` in the reports has these keys.
GRADIENTS, WEIGHTS, MATRICES = "gradients", "weights", "Muon's matrices"
ACTIVATIONS, SMALL = "tensor-parallel activations", "norms, flags and counts"
GRADIENT_BYTES = 4  # an element, while gradients are reduced in the shipped configurations
SMALL_CALLS, SMALL_BYTES = 4, 512  # per step in every layout: counts, norm, LAMB's sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """All calls of one kind in one optimizer step."""

    kind: str
    calls: int
    bytes: float  # of the whole tensors, all calls together
    is_all_reduce: bool
    ranks: int  # that take part
    crosses_nodes: bool
    rings: int = 1  # groups that do the same at the same time over one node's link

    @property
    def wire_bytes(self) -> float:
        """Sent by one rank."""
        return ring_bytes(self.bytes, self.ranks, is_all_reduce=self.is_all_reduce)

    @property
    def hops(self) -> int:
        """Messages one after the other: the depth of a tree, for an all-reduce up and down."""
        return self.calls * (1 + self.is_all_reduce) * math.ceil(math.log2(self.ranks))


def ring_bytes(tensor_bytes: float, ranks: int, *, is_all_reduce: bool) -> float:
    """Bytes that each of `ranks` sends in a ring.

    2 (n - 1) / n of the tensor for an all-reduce; (n - 1) / n for a gather, a scatter, a
    reduce-scatter or a reduction to one rank.
    """
    return (1 + is_all_reduce) * tensor_bytes * (ranks - 1) / ranks


def count_collectives(layout: Layout) -> list[Collective]:
    """The collectives that one rank takes part in; those of a single rank are left out."""
    collectives = [*_data_parallel(layout), *_tensor_parallel(layout), *_over_all(layout)]
    return [collective for collective in collectives if collective.ranks > 1]


def _data_parallel(layout: Layout) -> list[Collective]:
    passes = layout.accumulation
    reductions = count_reductions(layout.zero, passes)
    gathers = {0: 0, 1: 1, 2: 1, 3: passes}[layout.zero]
    # At ZeRO-1 and 2 DeepSpeed uses an all-reduce, though a reduce-scatter would do. Weights with
    # and without weight decay, and Muon's, are gathered by separate calls.
    kinds = (
        (GRADIENTS, reductions, 1, GRADIENT_BYTES, layout.zero < 3),
        (WEIGHTS, gathers, 2 + layout.muon, layout.weight_bytes, False),
    )
    return [
        Collective(
            kind=kind,
            calls=times * calls,
            bytes=times * width * layout.parameters,
            is_all_reduce=is_all_reduce,
            ranks=layout.data_parallel,
            crosses_nodes=layout.nodes > 1,
            rings=min(layout.tensor_parallel, layout.ranks_a_node),
        )
        for kind, times, calls, width, is_all_reduce in kinds
    ]


def _tensor_parallel(layout: Layout) -> list[Collective]:
    layers = layout.model.num_layers
    rank = layout.model.lora_rank
    # The blocks of a layer whose forward pass runs once more, with its all-reduces.
    again = CHECKPOINTING.index(layout.activation_checkpointing)
    # 2 forward and 2 backward a layer; for low-rank pairs 2 forward, 4 backward.
    calls = (4 + again + (6 + again) * bool(rank)) * layers * layout.accumulation
    # All but the first gradient's hold of the last layer only the tokens whose last state is
    # needed.
    narrow = (3 + again) * ((layers - 1) * layout.tokens_a_pass + layout.needed_a_pass)
    elements = (layers * layout.tokens_a_pass + narrow) * layout.model.hidden_size
    # Of a pair: what lies between its factors, but the first factors' gradients of query, key and
    # value, whose input is reduced already.
    elements += rank * (narrow + 3 * layers * layout.model.hidden_size)
    return [
        Collective(
            kind=ACTIVATIONS,
            calls=calls,
            bytes=layout.accumulation * elements * layout.weight_bytes,
            is_all_reduce=True,
            ranks=layout.tensor_parallel,
            crosses_nodes=layout.tensor_parallel > layout.ranks_a_node,
        )
    ]


def _over_all(layout: Layout) -> list[Collective]:
    matrices = 2 * 4 * layout.matrix_parameters  # Muon's: each to its rank and back, in fp32
    kinds = (
        (SMALL, SMALL_CALLS, SMALL_CALLS * SMALL_BYTES, True),
        (MATRICES, 2 * len(layout.matrices), matrices, False),
    )
    return [
        Collective(
            kind=kind,
            calls=calls,
            bytes=size,
            is_all_reduce=is_all_reduce,
            ranks=layout.ranks,
            crosses_nodes=layout.nodes > 1,
        )
        for kind, calls, size, is_all_reduce in kinds
    ]
