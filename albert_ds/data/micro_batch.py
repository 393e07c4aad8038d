"""From samples to a micro-batch: the concatenation of its sequences, padded as a whole or not.

Shapes: B sequences, N tokens, P predicted positions of a micro-batch.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from albert_ds.data.fixed_shapes import fix_shapes
from albert_ds.data.samples import Sample
from albert_ds.data.segments import NO_LABEL
from albert_ds.data.stream_config import StreamConfig
from albert_ds.model.draws import draw_seeds
from albert_ds.vocab.vocab import CLS, SEP


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The model's keywords, and counts for the metrics.

    input_ids, token_type_ids, position_ids, seeds int64 [N]; cu_seqlens int32 [B+1]; max_seqlen
    int; masked_positions, masked_labels int64 [P]; pair_labels int64 [B]; of a fixed shape more of
    each (`fixed_shapes.py`). All tensors are one in memory: each tensor of a loader's worker takes
    a file descriptor, and each copy to a device its time.
    """

    packed: torch.Tensor  # int64: the tensors, one after the other
    lengths: dict[str, int]  # of each tensor, in their order
    max_seqlen: int
    samples: int  # B; 0 for the dummy that a rank without a sample is given
    tokens: int  # N of those samples
    masked: int  # P
    pairs: int  # sequences with a pair label
    unpaired: int  # sequences whose sop or nsp label is ignored: no pair could be made
    unused_tokens: int  # stored tokens left out by a short draw
    available: int  # stored tokens of these sequences
    words: int = 0  # of those samples
    sample_ids: list[int]  # positions of the samples in the global stream
    overflows: bool = False  # its shape should be fixed and could not

    @classmethod
    def pack(cls, tensors: dict[str, torch.Tensor], **others) -> "MicroBatch":
        packed = torch.cat([x.long() for x in tensors.values()])
        return cls(packed=packed, lengths={n: len(x) for n, x in tensors.items()}, **others)

    @property
    def tensors(self) -> dict:
        """The model's keywords on the host."""
        return self._unpack(self.packed)

    def pin_memory(self) -> "MicroBatch":
        """A copy in pinned memory, which a thread of torch's loader makes for CUDA."""
        return replace(self, packed=self.packed.pin_memory())

    def on(self, device: torch.device) -> dict:
        """The model's keywords on `device`."""
        return self._unpack(send(self.packed, device))

    def _unpack(self, packed: torch.Tensor) -> dict:
        parts = packed.split(list(self.lengths.values()))
        tensors = dict(zip(self.lengths, parts, strict=True))
        tensors["cu_seqlens"] = tensors["cu_seqlens"].int()
        return {**tensors, "max_seqlen": self.max_seqlen}


def to_device(tensors: dict, device: torch.device) -> dict:
    """Tensors of the host, copied to `device` without waiting for it; other values as they are."""
    return {name: x if isinstance(x, int) else send(x, device) for name, x in tensors.items()}


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x of the host, copied to `device` without waiting for it.

    CUDA copies from pinned memory while the host goes on, and from other memory it does not.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def collate(
    samples: list[Sample], sample_ids: list[int], config: StreamConfig, *, fixed: bool = False
) -> MicroBatch:
    """Concatenate samples; without samples, a dummy [CLS] [SEP] on which no loss depends.

    config: of their draws. fixed: padded to a bucket (`fixed_shapes.py`), if it fits.
    """
    none = np.empty(0, int)
    dummy = Sample(np.array([CLS, SEP]), 2, none, none, NO_LABEL, 0, 0, np.ones(2, bool))
    parts = samples or [dummy]
    inputs = concatenate([part.ids for part in parts], [part.first for part in parts])
    begins = inputs["cu_seqlens"].tolist()[:-1]
    lengths = inputs["cu_seqlens"].diff().numpy()
    positions = [part.positions + begin for part, begin in zip(parts, begins, strict=True)]
    labels = np.concatenate([part.labels for part in parts])
    pair_labels = np.array([part.pair_label for part in parts])
    pairs = int((pair_labels != NO_LABEL).sum())
    used = sum(sample.used for sample in samples)
    available = sum(sample.available for sample in samples)
    max_seqlen = inputs.pop("max_seqlen")
    drawn = {
        "masked_positions": np.concatenate(positions),
        "masked_labels": labels,
        "pair_labels": pair_labels,
        "seeds": draw_seeds(config.seed, sample_ids or [0], lengths),
    }
    tensors = inputs | {name: torch.from_numpy(array) for name, array in drawn.items()}
    longest = max(config.sequence_length, max_seqlen)
    is_fixed = fixed and fix_shapes(tensors, longest, config)
    return MicroBatch.pack(
        tensors,
        max_seqlen=longest if is_fixed else max_seqlen,
        overflows=fixed and not is_fixed,
        samples=len(samples),
        tokens=int(lengths.sum()) if samples else 0,
        masked=len(labels),
        pairs=pairs,
        unpaired=0 if config.objective == "none" else len(samples) - pairs,
        unused_tokens=available - used,
        available=available,
        words=sum(sample.words for sample in samples),
        sample_ids=sample_ids,
    )


def concatenate(sequences: list[np.ndarray], firsts: list[int]) -> dict[str, Any]:
    """The encoder's keywords for sequences of ids end to end, each with its tokens of segment A.

    input_ids, token_type_ids, position_ids int64 [N]; cu_seqlens int32 [B + 1]; max_seqlen int.
    """
    lengths = np.array([len(ids) for ids in sequences])
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    segments = positions >= np.repeat(firsts, lengths)
    return {
        "input_ids": torch.from_numpy(np.concatenate(sequences)).long(),
        "token_type_ids": torch.from_numpy(segments).long(),
        "position_ids": torch.from_numpy(positions),
        "cu_seqlens": torch.from_numpy(np.concatenate([[0], ends])).int(),
        "max_seqlen": int(lengths.max()),
    }
