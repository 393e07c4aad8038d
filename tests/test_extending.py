"""docs/architecture.md's ways to add a row to a table, from outside, each used by a training."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import albert_ds
from albert_ds.base.cli import Range
from albert_ds.base.errors import UserError
from albert_ds.checkpoint.folder import WEIGHTS
from albert_ds.data.segments import DRAWS
from albert_ds.data.stream_config import OBJECTIVES, Objective, list_pair_tasks
from albert_ds.engine.optimizers import OPTIMIZERS, PARAMS, Kind
from albert_ds.model.albert import TERMS, AlbertForPretraining, Term
from albert_ds.model.config import count_flops
from albert_ds.model.encoder import BUILD as FORMS
from albert_ds.model.fused import Linear
from albert_ds.model.hugging_face import to_hf
from albert_ds.model.per_layer import BUILD, fold
from albert_ds.model.projections import FEED_FORWARDS, PROJECTIONS, Projection
from albert_ds.model.shapes import count_params
from albert_ds.model.sharing import ADDITIONS, PATTERNS, Addition, Pattern
from albert_ds.model.task_heads import HEADS, Head, PooledHead
from albert_ds.optim.adam import MOMENTS, decay_groups
from albert_ds.tasks.features import FeatureBuilder
from albert_ds.tasks.recipes import RECIPES, Recipe
from albert_ds.tasks.registry import TASKS
from tests.batches import concatenate, random_samples
from tests.command import run_command
from tests.conftest import train_command
from tests.distributed import run_ranks
from tests.finetuning import draw_sentences
from tests.legs import read_step, records, stop_after
from tests.reference import update_error
from tests.runs import SMALL, small_batches, small_config, train_ranks


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


def compute_size(model, states):
    """Half the square of the pooled states, while training."""
    return (0.5 * states.pooled.float().square().sum(),) if model.training else None


TABLES = (PATTERNS, ADDITIONS, BUILD, OBJECTIVES, DRAWS, TERMS)
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
    {"size": Term(compute=compute_size, per="pairs")},
)


@pytest.fixture
def toys(monkeypatch):
    for known, rows in zip(TABLES, ROWS, strict=True):
        for name, row in rows.items():
            monkeypatch.setitem(known, name, row)


def train_toys(rank: int, words: list):
    """The product's own command."""
    for known, rows in zip(TABLES, ROWS, strict=True):
        known.update(rows)
    return stop_after(rank, words, None)


def test_a_toy_of_each_trains_two_steps(toys, data, tmp_path):
    flags = dict(steps=2, num_layers=3, dropout=0, average=0.8, warmup_steps=0)
    flags |= dict(sharing="ends", per_layer="gate", objective="back")
    words = ["train", *train_command(data, tmp_path / "run", **flags)[2:]]
    before = run_ranks(train_toys, 2, words)[0].start[WEIGHTS]
    after = read_step(tmp_path / "run", 2, WEIGHTS)
    values = [record for record in records(tmp_path / "run") if "samples" in record][-1]
    assert values["back_loss"] > 0 and values["back_accuracy"] is not None
    parts = [values[f"{name}_loss"] for name in ("mlm", "back", "size")]
    assert values["loss"] == pytest.approx(sum(parts)) and all(part > 0 for part in parts)
    gates = [name for name in after if name.endswith("result.bias")]
    assert len(gates) == 2 * 3
    assert all(not before[name].any() and after[name].any() for name in gates)
    assert sum("self_attention.query.weight" in name for name in after) == 2


def test_a_toy_is_known_where_tables_are_read(toys):
    config = replace(SMALL, sharing="ends", per_layer="gate,norm")
    model = AlbertForPretraining(config)
    assert sum(p.numel() for p in model.parameters()) == sum(count_params(config).values())
    assert config.plan == [(0, 0), (1, 1), (0, 0)]
    batch = concatenate(random_samples(4, vocab_size=SMALL.vocab_size, max_length=32, seed=0))
    outputs = model(**batch.tensors, scales=torch.tensor([0.5, 0.25]))
    pairs = outputs["pair_loss_sum"] + outputs["size_loss_sum"]
    torch.testing.assert_close(outputs["loss"], 0.5 * outputs["mlm_loss_sum"] + 0.25 * pairs)
    assert model.eval()(**batch.tensors)["size_loss_sum"] == 0
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
        params={**PARAMS, "momentum": Range(ge=0, lt=1)},
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
    run = tmp_path / "run"
    flags = {"learning_rate": 0.0625, "warmup_steps": 0, "save_every": 1}
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


class GatedFeedForward(nn.Module):
    """down(gelu(gate(x)) * up(x)): GeGLU (Shazeer 2020)."""

    def __init__(self, config):
        super().__init__()
        self.up, self.gate = (Linear(config.hidden_size, config.ffn_size) for _ in range(2))
        self.down = Linear(config.ffn_size, config.hidden_size)

    def forward(self, x, own=None):
        return self.down(nn.functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


GATE = Projection(
    block="ffn",
    module="feed_forward",
    width_in="hidden_size",
    width_out="ffn_size",
    is_column=True,
    hugging_face=None,
)
GATED = (
    (PROJECTIONS, {"gate": GATE}),
    (FEED_FORWARDS, {"geglu": ("up", "gate", "down")}),
    (FORMS, {"geglu": GatedFeedForward}),
)


def train_gated(rank: int, layout: dict):
    """Two steps of a gated model."""
    for known, rows in GATED:
        known.update(rows)
    config = small_config(model=replace(SMALL, feed_forward="geglu"), **layout)
    return train_ranks(rank, [config], small_batches(2))[0]


def test_a_gated_feed_forward_is_trained_alike_on_cut_blocks():
    layouts = ({"world_size": 1, "stage": 0}, {"world_size": 2, "stage": 1, "tensor_parallel": 2})
    alone, other = (run_ranks(train_gated, x["world_size"], x)[0] for x in layouts)
    whole, cut, before = alone.weights, other.weights, alone.initial
    gates = [name for name in whole if "feed_forward.gate" in name]
    assert len(gates) == 2 and all((whole[name] != before[name]).any() for name in gates)
    assert update_error(cut, whole, before) < 1e-5


def test_a_gated_feed_forward_is_counted_and_not_exported(monkeypatch):
    for known, rows in GATED:
        for name, row in rows.items():
            monkeypatch.setitem(known, name, row)
    gated, plain = (replace(SMALL, feed_forward=form) for form in ("geglu", "gelu"))
    model = AlbertForPretraining(gated)
    assert sum(p.numel() for p in model.parameters()) == sum(count_params(gated).values())
    counts = {"tokens": 5, "squared_lengths": 25, "masked": 1}
    more = count_flops(gated, **counts) - count_flops(plain, **counts)
    assert more == 6 * 5 * SMALL.num_layers * SMALL.hidden_size * SMALL.ffn_size
    with pytest.raises(UserError, match="feed_forward geglu: .* no place for its gate projection"):
        to_hf(gated, model.state_dict())


def sum_binary_entropies(logits, labels):
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


class MarkedTask:
    """Several labels an example: which of three words a sentence has. Lines "words<tab>text"."""

    head = "each"
    labels = ("class", "type", "string")
    metrics = ("right",)
    dev_splits = ("dev",)
    test_splits = ()
    has_test_labels = False
    published = {}

    def files(self, data, split):
        return [data / f"{split}.txt"]

    def _read(self, data, split):
        return [line.split("\t") for line in self.files(data, split)[0].read_text().splitlines()]

    def count_examples(self, data):
        return len(self._read(data, "train"))

    def build(self, data, split, vocab, lengths):
        builder = FeatureBuilder()
        rows = self._read(data, split)
        for number, (_, text) in enumerate(rows):
            builder.add_example(number, vocab.encode([text]), lengths.sequence)
        builder.count("examples", len(rows))
        marks = [[float(label in words.split(",")) for label in self.labels] for words, _ in rows]
        return builder.build(labels=np.array(marks, np.float32))

    def score(self, split, outputs):
        marks = split.features.arrays["labels"] > 0
        return {"right": float(((outputs["logits"] > 0) == marks).mean())}

    def write(self, split, outputs, folder, metrics):
        predictions = (outputs["logits"] > 0).astype(int).tolist()
        (folder / f"predictions.{split.name}.json").write_text(json.dumps(predictions))


def tune_with_marks(rank: int, words: list) -> tuple[int, str]:
    HEADS["each"] = Head(
        build=partial(PooledHead, loss=sum_binary_entropies),
        width=lambda labels: labels,
        reads_pooled=True,
    )
    TASKS["marked"] = MarkedTask()
    RECIPES["marked"] = Recipe(learning_rate=5e-3, batch_size=16, epochs=8, warmup=0.1)
    done = run_command(*words)
    return done.code, done.out + done.err


def test_a_head_and_its_kind_of_task_are_a_row_each(checkpoint, tmp_path):
    """It learns, its predictions are written, and its export is refused in one line."""
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for split, count, seed in (("train", 160, 1), ("dev", 40, 2)):
        lines = [
            ",".join(label for label in MarkedTask.labels if label in text.split()) + f"\t{text}"
            for text in draw_sentences(count, seed)
        ]
        (data / f"{split}.txt").write_text("\n".join(lines) + "\n")
    words = ["finetune", "--task", "marked", "--data", data, "--checkpoint", checkpoint]
    words += ["--output", run, "--dropout", 0, "--eval-every", 40, "--log-every", 1]
    ((code, said),) = run_ranks(tune_with_marks, 1, words)
    assert code == 0, said
    results = json.loads((run / "results.json").read_text())
    assert results["step"] == 80  # 8 epochs of its own count
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    # At first each of three labels is as likely as not.
    assert losses[0] == pytest.approx(3 * math.log(2), rel=0.1)
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.01
    assert results["dev"]["right"] > 0.5
    predicted = json.loads((run / "predictions.dev.json").read_text())
    assert np.shape(predicted) == (40, 3)
    words = ["export", "--checkpoint", run, "--output", tmp_path / "hf"]
    ((code, said),) = run_ranks(tune_with_marks, 1, words)
    assert code == 2 and "its head is 'each'; Hugging Face has no such ALBERT" in said
    assert said.count("\n") == 1


def test_an_optimizer_is_named_in_its_row_and_its_file_alone():
    package = Path(albert_ds.__file__).parent
    for name, module in {"Lamb": "lamb", "Muon": "muon", "FusedLamb": "fused_lamb"}.items():
        named = {
            str(path.relative_to(package))
            for path in package.rglob("*.py")
            if f'"{name}"' in (text := path.read_text()) or f"albert_ds.optim.{module} " in text
        }
        assert named <= {"engine/optimizers.py", f"optim/{module}.py", "optim/fused_lamb.py"}


def test_the_diffs_of_contributing_are_the_rows_of_these_tests():
    root = Path(__file__).parents[1]
    tests = [root / "tests" / "test_extending.py", root / "tests" / "text" / "test_kinds.py"]
    known = "\n".join(path.read_text() for path in tests)
    block = (root / "CONTRIBUTING.md").read_text().split("```diff\n")[1].split("```")[0]
    added = [line for line in block.splitlines() if line.startswith("+")]
    inner = [line[9:].rstrip(",") for line in added if line.startswith("+        ")]
    assert len(inner) == 14 and all(line in known for line in inner)
    for line in block.splitlines():
        if line.startswith(" "):
            table, _, place = line[1:].partition("#")
            path = place.split(";")[0].strip()
            assert f"\n{table.strip()}" in (root / path).read_text(), line
