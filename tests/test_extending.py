"""docs/architecture.md's ways to add a pattern, an addition and an objective, from outside."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from albert_ds.base.errors import UserError
from albert_ds.data.segments import DRAWS
from albert_ds.data.shards import open_shards
from albert_ds.data.stream_config import OBJECTIVES, Objective, list_pair_tasks
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.per_layer import BUILD, fold
from albert_ds.model.shapes import count_params
from albert_ds.model.sharing import ADDITIONS, PATTERNS, Addition, Pattern
from tests.distributed import run_ranks
from tests.runs import SMALL, gather, join, take_step
from tests.test_layout_change import Leg, config_of


class Gate(nn.Module):
    """x (1 + bias): an addition that starts as nothing."""

    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * (1 + self.bias)


def turn_back(first, second, draw_other, rng):
    """Label 1: the words of the second segment are in reverse order."""
    label = int(rng.random() < 0.5)
    return first, second[::-1].copy() if label else second, label


TABLES = (PATTERNS, ADDITIONS, BUILD, OBJECTIVES, DRAWS)
ROWS = (
    {
        "ends": Pattern(
            form="ends",
            meaning="one block for both ends, one for the middle",
            plan=lambda _, layers: [(int(0 < n < layers - 1),) * 2 for n in range(layers)],
        )
    },
    {
        "gate": Addition(
            form="gate",
            meaning="a factor for each unit of a block's result",
            places=("attention.result", "ffn.result"),
        )
    },
    {"gate": lambda config, place, value: Gate(config.hidden_size)},
    {"back": Objective(title="BACK", labels=("forwards", "backwards"), format=1)},
    {"back": turn_back},
)


@pytest.fixture
def toys(monkeypatch):
    for known, rows in zip(TABLES, ROWS, strict=True):
        for name, row in rows.items():
            monkeypatch.setitem(known, name, row)


def train_toys(rank: int, data, vocab_size: int, folder):
    """Two steps of the product; the weights after them and the metrics."""
    from albert_ds.training.pretrain import prepare

    for known, rows in zip(TABLES, ROWS, strict=True):
        known.update(rows)
    config = config_of(Leg(stage=1, data_parallel=2), data, vocab_size, folder)
    model = replace(config.model, sharing="ends", per_layer="gate")
    config = replace(config, model=model, stream=replace(config.stream, objective="back"), steps=2)
    device, mesh, traffic = join(1)
    run = prepare(config, mesh, device, traffic)
    before = gather(run.engine)
    for _ in range(2):
        take_step(run)
    values = run.window.close(mesh, "back")
    return values, before, gather(run.engine)


def test_a_toy_of_each_trains_two_steps(toys, data, tmp_path):
    vocab_size = open_shards(data, "train").vocab.size
    values, before, after = run_ranks(train_toys, 2, data, vocab_size, tmp_path)[0]
    assert values["back_loss"] > 0 and values["back_accuracy"] is not None
    gates = [name for name in after if name.endswith("result.bias")]
    assert len(gates) == 2 * SMALL.num_layers
    assert all(not before[name].any() and after[name].any() for name in gates)
    assert sum("self_attention.query.weight" in name for name in after) == 2


def test_a_toy_is_known_where_tables_are_read(toys):
    config = replace(SMALL, sharing="ends", per_layer="gate,norm")
    model = AlbertForPretraining(config)
    assert sum(p.numel() for p in model.parameters()) == sum(count_params(config).values())
    assert config.plan == [(0, 0), (1, 1), (0, 0)]
    deep = replace(config, num_layers=5)  # blocks 0 1 1 1 0
    assert deep.running_layers(3) == [0, 1, 4]
    assert list_pair_tasks()["back"] == "BACK"
    with pytest.raises(UserError, match="--per-layer gate,norm: .*result.bias has no place in"):
        fold(config, model.state_dict())
