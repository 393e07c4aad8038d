"""What the stream is asked for and what it yields (the lead wrote this file; the data engineer may
move these two classes, keeping their fields)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    objective: str = "sop"
    sequence_length: int = 512
    short_fraction: float = 0.1
    masked_fraction: float = 0.15
    max_predictions: int | None = None
    max_ngram: int = 3
    word_boundaries: str = "unicode"
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    tensors: dict
    samples: int
    tokens: int
    masked: int
    pairs: int
    unpaired: int
    set_aside: int
    available: int
    sample_ids: list[int]

    def on(self, device) -> dict:
        """The model's keywords on `device`; copies do not make the host wait."""
        return {
            name: value if isinstance(value, int) else value.to(device, non_blocking=True)
            for name, value in self.tensors.items()
        }
