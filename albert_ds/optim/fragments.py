"""Where a process holds pieces of the logical tensors that an optimizer updates."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamFragment:
    """Consecutive elements of a parameter (or its tensor-parallel shard), held in fp32 here.

    A rank has one of every parameter, in the same order as all ranks; it may hold no element.
    """

    name: str  # logical tensor
    group: int  # parameter group of the optimizer
    flat: Tensor  # fp32 flat parameter: master weights, and the key of the optimizer's state
    start: int  # first element in `flat`
    offset: int  # first element in the flattened local shard
    numel: int

    @property
    def in_flat(self) -> slice:
        """Its elements in `flat`."""
        return slice(self.start, self.start + self.numel)

    @property
    def in_shard(self) -> slice:
        """Its elements in the flattened local shard."""
        return slice(self.offset, self.offset + self.numel)
