"""A start whose attention looks at the neighbouring tokens and for the same word elsewhere.

From random weights attention begins uniform, and a small model takes thousands of steps to find
that the tokens beside a mask tell most about it (docs/learning.md). It does not find within hours
how to compare two segments word by word. Here the positions, the queries and the keys begin so that
heads attend to the token before, the one after, the same word elsewhere, and those two before and
two after; where they look beside, [CLS] attends to all. Nothing is fixed: training may change all.

A position p begins as sin(p f) and cos(p f) of D / 2 frequencies f. The product of two such vectors
depends on their distance alone and is largest at distance 0; with one of them turned by the angles
o f, at distance o. Queries are turned, keys are not. The same word has the same numbers in the
columns without a position; the token itself is excluded by the fastest frequencies, negated.
Shapes: T positions, E embedding, H hidden, D <= E / 4 columns that hold the position, n heads of
width H / n.
"""

import torch
from torch import Tensor

from albert_ds.model.albert import AlbertForPretraining

SAME_WORD = 0
HEADS = (-1, 1, SAME_WORD, -2, 2)  # what the first look at, an offset; further heads are random
SLOWEST = 1 / 30  # radians a token; the fastest frequency is 1
AMPLITUDE = 5  # of a position's numbers, in standard deviations of a word's
PEAK = 10.0  # logit of the token a head attends to


@torch.no_grad()
def attend_to_neighbours(model: AlbertForPretraining) -> None:
    """Change the weights of a model from `init_weights`, in place."""
    config, embeddings = model.config, model.albert.embeddings
    size, width = config.embedding_size, config.hidden_size // config.num_heads
    columns = min(size // 4, width) // 2 * 2
    frequencies = SLOWEST ** torch.linspace(0, 1, columns // 2, dtype=torch.float64)
    angles = torch.arange(config.max_position_embeddings)[:, None] * frequencies
    positions = torch.cat([angles.sin(), angles.cos()], dim=1)  # [T, D]
    positions[0] = 0  # [CLS] attends to the whole sequence: it has to tell of both segments
    embeddings.position.weight.zero_()
    embeddings.position.weight[:, :columns] = AMPLITUDE * config.initializer_range * positions
    compared = (size - columns) // 2  # of a word's numbers; a segment's would make all alike
    embeddings.token_type.weight[:, : columns + compared] = 0
    if size != config.hidden_size:
        # The embedding itself is the first E of the H numbers; the others are as large.
        weight = embeddings.get_parameter("projection.weight")
        weight.mul_(size**-0.5 / config.initializer_range)
        weight[:size] = torch.eye(size)
    # Squares of a token's numbers, in variances of a word's; the LayerNorm makes their mean 1.
    place, word, segment = columns / 2 * AMPLITUDE**2, size, size - columns - compared
    mean = (place + word + segment) / size
    for block in model.albert.encoder.attention:
        query, key = (block.get_parameter(f"self_attention.{x}.weight") for x in ("query", "key"))
        for head, offset in enumerate(HEADS[: config.num_heads]):
            q, k = (weight[head * width : (head + 1) * width] for weight in (query, key))
            if offset == SAME_WORD:
                _attend_to_same(q, k, columns, compared, place / mean, 1 / mean)
            else:
                scale = _scale(place / mean, width)
                q[:columns], k[:columns] = 0, 0
                q[:columns, :columns] = scale * _turn(offset * frequencies)
                k[:columns, :columns] = scale * torch.eye(columns)


def _attend_to_same(q: Tensor, k: Tensor, columns: int, compared: int, place: float, word: float):
    """Let a head, [H / n, H], look for the same word, but not at its own place.

    compared: numbers of a word after the columns of the position. place: square of a position's
    numbers together; word: of each of a word's.
    """
    width, half = len(q), columns // 2
    fast = min(width // 8, half)  # frequencies: the fastest tell a token from those beside it
    number = min(width - 2 * fast, compared)
    q[: number + 2 * fast], k[: number + 2 * fast] = 0, 0
    same = _scale(word * number, width) * torch.eye(number)
    q[:number, columns : columns + number] = k[:number, columns : columns + number] = same
    away = _scale(place * fast / half, width) * torch.eye(fast)
    for first in (0, half):  # sines, cosines
        rows = slice(number + min(first, fast), number + min(first, fast) + fast)
        q[rows, first : first + fast] = -away
        k[rows, first : first + fast] = away


def _scale(square: float, width: int) -> float:
    """The factor of queries and keys with which PEAK is the logit of a vector with itself.

    square: of the vector's length. A logit is divided by the root of the head's width.
    """
    return (PEAK * width**0.5 / square) ** 0.5


def _turn(angles: Tensor) -> Tensor:
    """The matrix [D, D] that adds `angles` [D / 2] to those of a position."""
    sin, cos = angles.sin().diag(), angles.cos().diag()
    return torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)]).float()
