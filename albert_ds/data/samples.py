"""From a stored sequence to a masked sample, and from samples to a micro-batch.

A micro-batch is the concatenation of its sequences, [CLS] A [SEP] B [SEP] each (paper Sec. 3.1),
or [CLS] A [SEP] where the sequence has one sentence. Nothing is ever padded.
Shapes: B sequences, N tokens, P predicted positions of a micro-batch; T tokens of a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from albert_ds.data.masking import count_predictions, draw_positions, draw_replacements
from albert_ds.data.records import Sequence
from albert_ds.data.segments import NO_LABEL, OBJECTIVES, draw_pair, draw_target
from albert_ds.data.vocab import CLS, MASK, SEP
from albert_ds.data.words import WORD_RULES
from albert_ds.errors import UserError

if TYPE_CHECKING:
    import torch

NUM_MARKS = 3  # [CLS] and two [SEP]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How samples are drawn from stored sequences."""

    objective: str = "sop"  # OBJECTIVES: sentence order, next sentence, or masked tokens alone
    sequence_length: int = 512  # tokens at most, [CLS] and [SEP] among them
    short_fraction: float = 0.1  # of the sequences are cut to a random length
    masked_fraction: float = 0.15  # of a sequence's tokens are to be predicted
    max_predictions: int | None = None  # tokens at most; 20 as released, None as in the paper
    max_ngram: int = 3  # words that are masked together, at most
    word_boundaries: str = "unicode"  # WORD_RULES: what a whole word is
    seed: int = 0  # of everything that is drawn

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise UserError(f"--objective {self.objective}: must be one of {', '.join(OBJECTIVES)}")
        if self.word_boundaries not in WORD_RULES:
            allowed = ", ".join(WORD_RULES)
            raise UserError(f"--word-boundaries {self.word_boundaries}: must be one of {allowed}")
        if self.sequence_length < NUM_MARKS + 2:
            raise UserError(f"--sequence-length {self.sequence_length}: must be at least 5")
        for flag in ("short_fraction", "masked_fraction"):
            if not 0 <= getattr(self, flag) <= 1:
                name = "--" + flag.replace("_", "-")
                raise UserError(f"{name} {getattr(self, flag)}: must be in 0 .. 1")
        if self.max_ngram < 1:
            raise UserError(f"--max-ngram {self.max_ngram}: must be at least 1")
        if self.max_predictions is not None and self.max_predictions < 1:
            raise UserError(f"--max-predictions {self.max_predictions}: must be at least 1")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"--seed {self.seed}: must be in 0 .. 2**63 - 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The tensors that the model takes as keywords, and what there is to count about them.

    input_ids, token_type_ids, position_ids int64 [N]; cu_seqlens int32 [B+1]; max_seqlen int;
    masked_positions, masked_labels int64 [P]; pair_labels int64 [B].
    """

    tensors: dict[str, "torch.Tensor | int"]
    samples: int  # B, but 0 for the dummy that a rank without a sample is given
    tokens: int  # N of those samples
    masked: int  # P
    pairs: int  # sequences with a pair label
    unpaired: int  # sequences whose sop or nsp label is ignored: no pair could be made
    set_aside: int  # stored tokens left out by a short draw
    available: int  # stored tokens of these sequences
    sample_ids: list[int]  # their positions in the global stream

    def on(self, device: "torch.device") -> dict[str, "torch.Tensor | int"]:
        """The model's keywords on `device`; the copies do not make the host wait."""
        return {
            name: value if isinstance(value, int) else value.to(device, non_blocking=True)
            for name, value in self.tensors.items()
        }


class Sample(NamedTuple):
    ids: np.ndarray  # int64 [T], masked
    first: int  # tokens of [CLS] A [SEP]
    positions: np.ndarray  # of the predicted tokens, ascending
    labels: np.ndarray  # what stood there
    pair_label: int
    used: int  # of the stored tokens
    available: int  # stored tokens


def draw_sample(
    sequence: Sequence,
    config: StreamConfig,
    word_starts: np.ndarray,
    draw_other: Callable[[], Sequence | None],
    rng: np.random.Generator,
) -> Sample:
    """Draw window, pair and mask of one stored sequence.

    Args:
        word_starts: bool [V], whether a piece starts a word.
        draw_other: draws a sequence of another document, None if there is none at hand (nsp).
    """
    target = draw_target(config.sequence_length - NUM_MARKS, config.short_fraction, rng)
    pair = draw_pair(sequence, target, config.objective, draw_other, rng)
    first, second = len(pair.first) + 2, len(pair.second) + (len(pair.second) > 0)
    ids = np.empty(first + second, np.int64)
    ids[0] = CLS
    ids[1 : first - 1] = pair.first
    ids[first - 1] = ids[-1] = SEP
    ids[first : first + len(pair.second)] = pair.second
    edges = [0, first - 1, len(ids) - 1] if second else [0, first - 1]
    budget = count_predictions(len(ids), config.masked_fraction, config.max_predictions)
    positions = draw_positions(word_starts[ids], edges, budget, config.max_ngram, rng)
    labels = ids[positions]
    ids[positions] = draw_replacements(labels, MASK, len(word_starts), rng)
    return Sample(ids, first, positions, labels, pair.label, pair.used, len(sequence.ids))


def collate(samples: list[Sample], sample_ids: list[int], objective: str) -> MicroBatch:
    """Concatenate samples; of none at all, a dummy [CLS] [SEP] that no loss depends on."""
    dummy = Sample(np.array([CLS, SEP]), 2, np.empty(0, int), np.empty(0, int), NO_LABEL, 0, 0)
    parts = samples or [dummy]
    lengths = np.array([len(part.ids) for part in parts])
    ends = np.cumsum(lengths)
    begins = ends - lengths
    position_ids = np.arange(ends[-1]) - np.repeat(begins, lengths)
    arrays = {
        "input_ids": np.concatenate([part.ids for part in parts]),
        "token_type_ids": position_ids >= np.repeat([part.first for part in parts], lengths),
        "position_ids": position_ids,
        "cu_seqlens": np.concatenate([[0], ends]),
        "masked_positions": np.concatenate(
            [part.positions + begin for part, begin in zip(parts, begins, strict=True)]
        ),
        "masked_labels": np.concatenate([part.labels for part in parts]),
        "pair_labels": np.array([part.pair_label for part in parts]),
    }
    pairs = int((arrays["pair_labels"] != NO_LABEL).sum())
    used = sum(sample.used for sample in samples)
    available = sum(sample.available for sample in samples)
    return MicroBatch(
        tensors=_to_tensors(arrays) | {"max_seqlen": int(lengths.max())},
        samples=len(samples),
        tokens=int(ends[-1]) if samples else 0,
        masked=len(arrays["masked_labels"]),
        pairs=pairs,
        unpaired=0 if objective == "none" else len(samples) - pairs,
        set_aside=available - used,
        available=available,
        sample_ids=sample_ids,
    )


def _to_tensors(arrays: dict[str, np.ndarray]) -> dict[str, "torch.Tensor | int"]:
    import torch

    kinds = {"cu_seqlens": np.int32}
    return {
        name: torch.from_numpy(array.astype(kinds.get(name, np.int64), copy=False))
        for name, array in arrays.items()
    }
