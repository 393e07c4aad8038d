"""From a stored sequence to a masked sample, and from samples to a micro-batch.

A micro-batch is the concatenation of its sequences, [CLS] A [SEP] B [SEP] each (paper Sec. 3.1),
or [CLS] A [SEP] where the window is one sentence. Nothing is ever padded.
Shapes: B sequences, N tokens, P predicted positions of a micro-batch; T tokens of a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from albert_ds.data.masking import count_predictions, draw_positions, draw_replacements
from albert_ds.data.segments import NO_LABEL, draw_pair, draw_target
from albert_ds.data.shards import Sequence
from albert_ds.data.stream_config import StreamConfig
from albert_ds.data.vocab import CLS, MASK, SEP
from albert_ds.data.words import find_word_starts

if TYPE_CHECKING:
    import torch

NUM_MARKS = 3  # [CLS] and two [SEP]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The model's keywords, and counts for the metrics.

    input_ids, token_type_ids, position_ids int64 [N]; cu_seqlens int32 [B+1]; max_seqlen int;
    masked_positions, masked_labels int64 [P]; pair_labels int64 [B]. All tensors are one in memory:
    each tensor of a loader's worker takes a file descriptor, and each copy to a device its time.
    """

    packed: "torch.Tensor"  # int64: the tensors, one after the other
    lengths: dict[str, int]  # of each tensor, in their order
    max_seqlen: int
    samples: int  # B; 0 for the dummy that a rank without a sample is given
    tokens: int  # N of those samples
    masked: int  # P
    pairs: int  # sequences with a pair label
    unpaired: int  # sequences whose sop or nsp label is ignored: no pair could be made
    truncated_tokens: int  # stored tokens left out by a short draw
    available: int  # stored tokens of these sequences
    sample_ids: list[int]  # positions of the samples in the global stream

    @classmethod
    def pack(cls, tensors: "dict[str, torch.Tensor]", **others) -> "MicroBatch":
        import torch

        packed = torch.cat([x.long() for x in tensors.values()])
        return cls(packed=packed, lengths={n: len(x) for n, x in tensors.items()}, **others)

    @property
    def tensors(self) -> dict:
        """The model's keywords on the host."""
        return self._unpack(self.packed)

    def pin_memory(self) -> "MicroBatch":
        """A copy in pinned memory, which a thread of torch's loader makes for CUDA."""
        return replace(self, packed=self.packed.pin_memory())

    def on(self, device: "torch.device") -> dict:
        """The model's keywords on `device`."""
        return self._unpack(send(self.packed, device))

    def _unpack(self, packed: "torch.Tensor") -> dict:
        parts = packed.split(list(self.lengths.values()))
        tensors = dict(zip(self.lengths, parts, strict=True))
        tensors["cu_seqlens"] = tensors["cu_seqlens"].int()
        return {**tensors, "max_seqlen": self.max_seqlen}


def to_device(tensors: dict, device: "torch.device") -> dict:
    """Tensors of the host, copied to `device` without waiting for it; other values as they are."""
    return {name: x if isinstance(x, int) else send(x, device) for name, x in tensors.items()}


def send(x: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """x of the host, copied to `device` without waiting for it.

    CUDA copies from pinned memory while the host goes on, and from other memory it does not.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class Sample(NamedTuple):
    ids: np.ndarray  # int64 [T], masked
    first: int  # tokens of [CLS] A [SEP]
    positions: np.ndarray  # of the predicted tokens, ascending
    labels: np.ndarray  # their ids before masking
    pair_label: int
    used: int  # of the stored tokens
    available: int  # stored tokens
    starts: np.ndarray  # bool [T], whether the token starts a word


def draw_sample(
    sequence: Sequence,
    config: StreamConfig,
    word_starts: np.ndarray,
    draw_other: Callable[[int], np.ndarray | None],
    rng: np.random.Generator,
) -> Sample:
    """Draw window, pair and mask of one stored sequence.

    Args:
        word_starts: int8 [V] of `build_word_starts`. A segmented sequence has its own words.
        draw_other: draws sentences of another document by their number of tokens, for nsp; see
            `draw_pair`.
    """
    target = draw_target(config.sequence_length - NUM_MARKS, config.short_fraction, rng)
    pair = draw_pair(sequence, target, config.objective, draw_other, rng)
    first, second = len(pair.first) + 2, len(pair.second) + (len(pair.second) > 0)
    ids = np.empty(first + second, np.int64)
    ids[0] = CLS
    ids[1 : first - 1] = pair.first
    ids[first - 1] = ids[-1] = SEP
    ids[first : first + len(pair.second)] = pair.second
    if sequence.segmented:
        starts = ids >= len(word_starts)
        ids %= len(word_starts)
    else:
        starts = find_word_starts(word_starts[ids])
    edges = [0, first - 1, len(ids) - 1] if second else [0, first - 1]
    budget = count_predictions(len(ids), config.masked_fraction, config.max_predictions)
    positions = draw_positions(starts, edges, budget, config.max_ngram, rng)
    labels = ids[positions]
    ids[positions] = draw_replacements(labels, MASK, len(word_starts), rng)
    available = len(sequence.ids)
    return Sample(ids, first, positions, labels, pair.label, pair.used, available, starts)


def collate(samples: list[Sample], sample_ids: list[int], objective: str) -> MicroBatch:
    """Concatenate samples; without samples, a dummy [CLS] [SEP] on which no loss depends."""
    import torch

    none = np.empty(0, int)
    dummy = Sample(np.array([CLS, SEP]), 2, none, none, NO_LABEL, 0, 0, np.ones(2, bool))
    parts = samples or [dummy]
    inputs = concatenate([part.ids for part in parts], [part.first for part in parts])
    begins = inputs["cu_seqlens"].tolist()[:-1]
    positions = [part.positions + begin for part, begin in zip(parts, begins, strict=True)]
    labels = np.concatenate([part.labels for part in parts])
    pair_labels = torch.tensor([part.pair_label for part in parts])
    pairs = int((pair_labels != NO_LABEL).sum())
    used = sum(sample.used for sample in samples)
    available = sum(sample.available for sample in samples)
    max_seqlen = inputs.pop("max_seqlen")
    return MicroBatch.pack(
        {
            **inputs,
            "masked_positions": torch.from_numpy(np.concatenate(positions)),
            "masked_labels": torch.from_numpy(labels),
            "pair_labels": pair_labels,
        },
        max_seqlen=max_seqlen,
        samples=len(samples),
        tokens=len(inputs["input_ids"]) if samples else 0,
        masked=len(labels),
        pairs=pairs,
        unpaired=0 if objective == "none" else len(samples) - pairs,
        truncated_tokens=available - used,
        available=available,
        sample_ids=sample_ids,
    )


def concatenate(sequences: list[np.ndarray], firsts: list[int]) -> dict[str, Any]:
    """The encoder's keywords for sequences of ids end to end, each with its tokens of segment A.

    input_ids, token_type_ids, position_ids int64 [N]; cu_seqlens int32 [B + 1]; max_seqlen int.
    """
    import torch

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
