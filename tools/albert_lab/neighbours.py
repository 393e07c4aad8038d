"""Weights to start from whose attention looks at the neighbouring tokens.

python -m albert_lab.neighbours --output START FLAGS    the flags that `albert-ds train` will take
albert-ds train --output RUN --init-from START FLAGS

From random weights attention begins uniform, and a small model takes thousands of steps to find
that the tokens beside a mask tell most about it (docs/learning.md). Here the positions, the queries
and the keys begin so that four heads of the first layers attend to the token before, the one
after, and those two before and two after; [CLS] attends to all. Training may change all of it.

A position p begins as sin(p f) and cos(p f) of D / 2 frequencies f. The product of two such vectors
depends on their distance alone and is largest at distance 0; with one of them turned by the angles
o f, at distance o. Queries are turned, keys are not.
Shapes: T positions, E embedding, H hidden, D <= E / 4 columns that hold the position, n heads of
width H / n.
"""

from dataclasses import asdict

import torch
from torch import Tensor

from albert_ds.base.cli import run
from albert_ds.base.errors import UserError
from albert_ds.base.files import check_folder, new_folder, write_json
from albert_ds.checkpoint.folder import IMPORTED, WEIGHTS, write_folder
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.settings.pretrain import read_config

OFFSETS = (-1, 1, -2, 2)  # of the first heads; further heads begin at random
SLOWEST = 1 / 30  # radians a token; the fastest frequency is 1
AMPLITUDE = 5  # of a position's numbers, in standard deviations of a word's
PEAK = 10.0  # logit of the token a head attends to


def main(argv: list[str]) -> None:
    """Write the weights that a run with these flags starts from, to its --output."""
    config, _ = read_config(argv, world_size=1)
    embedding = config.model.embedding_size
    hidden = config.model.hidden_size
    if not 8 <= embedding <= hidden or hidden < 2 * config.model.num_heads:
        raise UserError(
            f"--embedding-size {embedding}: must be from 8 to --hidden-size {hidden}, and a head "
            "at least 2 wide"
        )
    model = AlbertForPretraining(config.model, seed=config.seed)
    attend_to_neighbours(model)
    check_folder(config.run)
    with new_folder(config.run) as partial:
        write_folder(partial / IMPORTED, {WEIGHTS: model.state_dict()}, {"step": 0})
        # Without it a run that starts so would say that it was trained on all its positions.
        record = {"model": asdict(config.model), "trained_length": config.stream.sequence_length}
        write_json(partial / "config.json", record)


@torch.no_grad()
def attend_to_neighbours(model: AlbertForPretraining) -> None:
    """Change the weights of a model from `init_weights`, in place."""
    config = model.config
    embeddings = model.albert.embeddings
    width = config.hidden_size // config.num_heads
    columns = min(config.embedding_size // 4, width) // 2 * 2
    frequencies = SLOWEST ** torch.linspace(0, 1, columns // 2, dtype=torch.float64)
    angles = torch.arange(config.max_position_embeddings)[:, None] * frequencies
    positions = torch.cat([angles.sin(), angles.cos()], dim=1)  # [T, D]
    positions[0] = 0  # [CLS] attends to the whole sequence: it has to tell of both segments
    embeddings.position.weight.zero_()
    embeddings.position.weight[:, :columns] = AMPLITUDE * config.initializer_range * positions
    if config.has_map:
        # The embedding itself is the first E of the H numbers; the others are as large.
        weight = embeddings.get_parameter("projection.weight")
        weight.mul_(config.embedding_size**-0.5 / config.initializer_range)
        weight[: config.embedding_size] = torch.eye(config.embedding_size)
    # The embedding's LayerNorm gives E numbers of variance 1; positions have this share of it.
    energy = columns / 2 * AMPLITUDE**2
    share = energy / (energy + 2 * config.embedding_size)  # beside word and segment
    scale = (PEAK * width**0.5 / (share * config.embedding_size)) ** 0.5
    for block in model.albert.encoder.attention:
        query, key = (block.get_parameter(f"self_attention.{x}.weight") for x in ("query", "key"))
        for head, offset in enumerate(OFFSETS[: config.num_heads]):
            rows = slice(head * width, head * width + columns)
            query[rows], key[rows] = 0, 0
            query[rows, :columns] = scale * _turn(offset * frequencies)
            key[rows, :columns] = scale * torch.eye(columns)


def _turn(angles: Tensor) -> Tensor:
    """The matrix [D, D] that adds `angles` [D / 2] to those of a position."""
    sin = angles.sin().diag()
    cos = angles.cos().diag()
    return torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)]).float()


if __name__ == "__main__":
    run(main)
