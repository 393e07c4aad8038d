"""docs/architecture.md's ways to add a row to a table, from outside, each used by a training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import albert_ds
from albert_ds.base.cli import Number
from albert_ds.base.errors import UserError
from albert_ds.data.segments import DRAWS
from albert_ds.data.shards import open_shards
from albert_ds.data.stream_config import OBJECTIVES, Objective, list_pair_tasks
from albert_ds.engine.optimizers import OPTIMIZERS, PARAMS, Kind
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.per_layer import BUILD, fold
from albert_ds.model.shapes import count_params
from albert_ds.model.sharing import ADDITIONS, PATTERNS, Addition, Pattern
from albert_ds.optim.adam import MOMENTS, decay_groups
from tests.command import run_command
from tests.conftest import train_command
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


class SignOfMomentum(torch.optim.Optimizer):
    """m = b m + (1 - b) g; w -= lr sign(m)"""

    def __init__(self, parameters, *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0):
        super().__init__(decay_groups(parameters, weight_decay), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] += 1
                    state["exp_avg"].lerp_(p.grad, 1 - group["momentum"])
                    p.add_(state["exp_avg"].sign(), alpha=-group["lr"])


def train_with_sign(rank: int, words: list) -> tuple[int, str]:
    OPTIMIZERS["Sign"] = Kind(
        build=SignOfMomentum,
        params={**PARAMS, "momentum": Number(low=0, below=1)},
        moments=lambda group: ("exp_avg",),
    )
    done = run_command("train", *words)
    return done.code, done.err


def test_an_optimizer_is_one_row_and_what_it_computes(data, tmp_path):
    """Trained, saved and resumed under ZeRO-1, which leaves a rank pieces of the tensors."""
    ds_config = {
        "optimizer": {"type": "Sign", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 1},
    }
    (tmp_path / "sign.json").write_text(json.dumps(ds_config))
    run, flags = tmp_path / "run", {"learning_rate": 0.0625, "warmup_steps": 0, "save_every": 1}
    for steps in (2, 3):
        given = {**flags, "steps": steps, "num_workers": 0, "keep_last": 9}
        command = train_command(data, run, deepspeed_config=tmp_path / "sign.json", **given)
        (code, said), _ = run_ranks(train_with_sign, 2, command[2:])
        assert code == 0, said
    folders = [run / "checkpoints" / f"step-{step:08d}" for step in (1, 2, 3)]
    weights = [load_file(folder / "weights.safetensors") for folder in folders]
    for before, after in zip(weights, weights[1:], strict=False):
        moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
        rate = moved.max()
        assert rate > 0.01
        assert ((moved - rate).abs() < 1e-6).logical_or(moved == 0).all()
        assert (moved > 0).float().mean() > 0.5
    first, second = (load_file(folders[2] / f"{name}.safetensors") for name in MOMENTS)
    assert all(x.any() for x in first.values()) and not any(x.any() for x in second.values())


def test_an_optimizer_is_named_in_its_row_and_its_file_alone():
    package = Path(albert_ds.__file__).parent
    for name, module in {"Lamb": "lamb", "Muon": "muon", "FusedLamb": "fused_lamb"}.items():
        named = {
            str(path.relative_to(package))
            for path in package.rglob("*.py")
            if f'"{name}"' in (text := path.read_text()) or f"albert_ds.optim.{module} " in text
        }
        assert named <= {"engine/optimizers.py", f"optim/{module}.py", "optim/fused_lamb.py"}
