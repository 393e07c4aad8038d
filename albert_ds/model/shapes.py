"""The names, shapes and numbers of a model's parameters, from a model without values.

torch is imported when a model is built: a command line reads the callers of this file, and must not
wait for torch.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING

from albert_ds.model.config import ModelConfig

if TYPE_CHECKING:
    from albert_ds.model.task_heads import HeadConfig

# What the name of a parameter begins with -> the part that it counts in.
PARTS = {
    "albert.embeddings.": "embeddings",
    "albert.encoder.own.": "per_layer",
    "albert.encoder.attention.": "attention",
    "albert.encoder.ffn.": "ffn",
    "albert.pooler.": "pooler",
    "mlm_head.": "mlm_head",  # its V x E table is the embeddings'
    "pair_head.": "pair_head",
}


def build_shapes(config: ModelConfig, head: HeadConfig | None = None) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by name, without allocating any.

    Of the pretrained model, or, with `head`, of one fine-tuned for a task.
    """
    import torch

    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.model.task_heads import AlbertForTask

    with torch.device("meta"):
        model = AlbertForPretraining(config) if head is None else AlbertForTask(config, head)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@cache
def count_params(config: ModelConfig) -> dict[str, int]:
    """Parameters of AlbertForPretraining by part, each counted once.

    `embeddings`, `attention`, `ffn` and `pooler` together are what the paper's tables count;
    `per_layer` is what layers have beside their blocks.
    """
    counts = dict.fromkeys(PARTS.values(), 0)
    for name, shape in build_shapes(config).items():
        part = next(part for start, part in PARTS.items() if name.startswith(start))
        counts[part] += prod(shape)
    return counts
