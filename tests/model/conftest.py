"""A model of a few thousand parameters and a random micro-batch."""

import torch

from albert_ds.model.config import ModelConfig

INPUTS = (
    "input_ids",
    "token_type_ids",
    "position_ids",
    "cu_seqlens",
    "max_seqlen",
)  # of AlbertModel


def build_config(**changes) -> ModelConfig:
    """A model of a few thousand parameters in which no two sizes are equal."""
    sizes = dict(embedding_size=16, hidden_size=32, num_layers=4, num_heads=2, ffn_size=48)
    limits = dict(vocab_size=101, max_position_embeddings=40, dropout=0.0)
    return ModelConfig(**{**sizes, **limits, **changes})


def build_batch(lengths, *, masked=9, vocab_size=101, seed=0) -> dict:
    """Sequences of these lengths end to end, of every id but <pad>, whose row HF never trains."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, size):
        return torch.randint(low, high, (size,), generator=generator)

    total = sum(lengths)
    return {
        "input_ids": draw(1, vocab_size, total),
        "token_type_ids": torch.cat([(torch.arange(n) > n // 2).long() for n in lengths]),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_seqlen": max(lengths),
        "masked_positions": torch.randperm(total, generator=generator)[:masked].sort().values,
        "masked_labels": draw(0, vocab_size, masked),
        "pair_labels": draw(0, 2, len(lengths)),
    }
