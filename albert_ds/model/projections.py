"""The linear maps of a block, a row each, and which of them a form of the feed-forward part has.

A command line reads this file without waiting for torch. The modules are in `model/encoder.py`.
"""

from dataclasses import dataclass

from albert_ds.base.plugin import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A linear map with a bias; its name is that of its row."""

    block: str  # attention or ffn
    module: str  # where it stands in the block
    width_in: str  # fields of ModelConfig
    width_out: str
    # What tensor parallelism cuts: a column's outputs, or a row's inputs.
    is_column: bool
    shares_input: bool = False  # with the other columns of its module, so that it is copied once
    ends_block: bool = False
    hugging_face: str | None  # its name in a layer of theirs; None: they have none

    @property
    def widths(self) -> tuple[str, str]:
        return self.width_in, self.width_out


def _attention(name: str, **properties) -> Projection:
    return Projection(
        block="attention",
        module="self_attention",
        width_in="hidden_size",
        width_out="hidden_size",
        hugging_face=f"attention.{name}",
        **properties,
    )


PROJECTIONS = Table(Projection) | {
    "query": _attention("query", is_column=True, shares_input=True),
    "key": _attention("key", is_column=True, shares_input=True),
    "value": _attention("value", is_column=True, shares_input=True),
    "output": _attention("dense", is_column=False, ends_block=True),
    "up": Projection(
        block="ffn",
        module="feed_forward",
        width_in="hidden_size",
        width_out="ffn_size",
        is_column=True,
        hugging_face="ffn",
    ),
    "down": Projection(
        block="ffn",
        module="feed_forward",
        width_in="ffn_size",
        width_out="hidden_size",
        is_column=False,
        ends_block=True,
        hugging_face="ffn_output",
    ),
}
# Form of the feed-forward part -> its projections.
FEED_FORWARDS = Table(tuple) | {"gelu": ("up", "down")}


def list_projections(feed_forward: str) -> dict[str, Projection]:
    """Those of a layer with a feed-forward part of this form."""
    inner = FEED_FORWARDS[feed_forward]
    return {name: p for name, p in PROJECTIONS.items() if p.block != "ffn" or name in inner}


def list_places() -> tuple[str, ...]:
    """BLOCK.NAME of each, as additions of --per-layer name them."""
    return tuple(f"{projection.block}.{name}" for name, projection in PROJECTIONS.items())
