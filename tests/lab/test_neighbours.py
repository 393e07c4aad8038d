"""A start at the neighbours: what the heads attend to before the first step."""

import json

import pytest
import torch
from albert_lab.neighbours import OFFSETS, attend_to_neighbours, main

from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import ModelConfig
from albert_ds.settings.pretrain import read_config
from albert_ds.training.pretrain import write_run_files
from tests.conftest import train_command

SHAPES = {
    "learn": {"embedding_size": 256, "hidden_size": 256, "num_heads": 4},
    "albert-base": {"embedding_size": 128, "hidden_size": 768, "num_heads": 12},
    "bert-tiny": {"embedding_size": 128, "hidden_size": 128, "num_heads": 2, "sharing": "none"},
}


def build(name: str) -> AlbertForPretraining:
    shape = {"vocab_size": 8000, "num_layers": 2, "dropout": 0.0, **SHAPES[name]}
    config = ModelConfig(ffn_size=4 * shape["hidden_size"], **shape)
    return AlbertForPretraining(config, seed=1)


@torch.no_grad()
def find_attention(model: AlbertForPretraining, length: int) -> torch.Tensor:
    """What every token of a random sequence attends to in each layer, [L, n, N, N]."""
    ids = torch.randint(8000, (length,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, length], dtype=torch.int32)
    places = torch.arange(length)
    states = model.albert(ids, (places > length // 2).long(), places, ends, length)["hidden_states"]
    shares = []
    for x, (block, _) in zip(states, model.config.plan, strict=False):
        attention = model.albert.encoder.attention[block].self_attention
        q, k = (
            part(x).view(length, model.config.num_heads, -1).transpose(0, 1)
            for part in (attention.query, attention.key)
        )
        shares.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
    return torch.stack(shares)


def find_distances(model: AlbertForPretraining, length: int) -> torch.Tensor:
    """Of the token that is attended to most from its place, int64 [L, n, N]."""
    return find_attention(model, length).argmax(-1) - torch.arange(length)


@pytest.mark.parametrize("name", SHAPES)
def test_the_first_heads_attend_to_the_tokens_beside(name):
    model = build(name)
    attend_to_neighbours(model)
    distances = find_distances(model, 128)[..., 3:-3]
    for head, offset in enumerate(OFFSETS[: model.config.num_heads]):
        for layer in (0, 1):
            distance = distances[layer, head] - offset
            assert distance.mode().values == 0 and distance.abs().max() <= 1, (head, layer)
    random = find_distances(build(name), 128)[0, 0]
    assert (random.abs() <= 2).double().mean() < 0.2


@pytest.mark.parametrize("name", SHAPES)
def test_cls_attends_to_the_whole_sequence(name):
    model = build(name)
    attend_to_neighbours(model)
    attention = find_attention(model, 128)[:, :, 0]
    tokens = torch.special.entr(attention).sum(-1).exp()  # 128 where all get the same
    assert tokens.min() > 40


def test_a_run_can_start_so(data, tmp_path):
    """Its weights are those of --init-from in every layout: checkpoint/test_initial_weights.py."""
    given = {"seed": 3, "num_heads": 4}
    start = tmp_path / "start"
    main(train_command(data, start, **given)[2:])
    with pytest.raises(UserError, match="is of no pretraining run"):  # it is not written over
        main(train_command(data, start, **given)[2:])
    run = tmp_path / "run"
    argv = train_command(data, run, init_from=start, **given)[2:]
    config, opened = read_config(argv, world_size=2)
    write_run_files(config, opened)
    trained = json.loads((run / "config.json").read_text())["trained_length"]
    assert trained == config.stream.sequence_length < config.model.max_position_embeddings
    model = AlbertForPretraining(config.model, seed=3)
    attend_to_neighbours(model)
    torch.testing.assert_close(
        ModelFolder(start).read_weights(), dict(model.state_dict()), rtol=0, atol=0
    )


def test_a_shape_without_room_is_one_line(data, tmp_path):
    with pytest.raises(UserError, match="--embedding-size 4: must be from 8 to --hidden-size 32"):
        main(train_command(data, tmp_path / "start", embedding_size=4)[2:])
    assert not (tmp_path / "start").exists()
