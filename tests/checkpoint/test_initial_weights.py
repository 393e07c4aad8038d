"""--init-from another depth or sharing: the same function where it can be, a reason where not."""

from dataclasses import replace
from math import log

import pytest
import torch

from albert_ds.base.errors import UserError
from albert_ds.base.json_files import read_lines
from albert_ds.checkpoint.initial import read_initial_weights
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.model.albert import AlbertForPretraining
from tests.batches import concatenate, random_samples
from tests.command import run_program
from tests.conftest import train_command
from tests.distributed import run_ranks
from tests.models import write_run
from tests.runs import SMALL, gather, join, small_config

DEEP = replace(SMALL, num_layers=4)
TENSORS = concatenate(random_samples(3, vocab_size=SMALL.vocab_size, max_length=32, seed=0)).tensors
INPUTS = {k: v for k, v in TENSORS.items() if "masked" not in k and "pair" not in k}


def read_initial(folder, config) -> dict:
    return read_initial_weights(ModelFolder(folder), config)


@pytest.fixture
def write_checkpoint(tmp_path):
    """A run of an AlbertForPretraining of the given shape, and the model."""

    def write(config, seed=0, *, is_trained=False):
        model = AlbertForPretraining(config, seed=seed)
        if is_trained:
            torch.manual_seed(seed)
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor += 0.1 * torch.randn_like(tensor)
        return write_run(tmp_path / f"run{seed}", model, step=9), model

    return write


def states_of(model) -> list[torch.Tensor]:
    with torch.no_grad():
        return model.albert(**INPUTS)["hidden_states"]


def start(folder, config):
    model = AlbertForPretraining(config, seed=99)
    model.load_state_dict(read_initial(folder, config))
    return model


@pytest.mark.parametrize(
    ("sharing", "others"),
    {
        "all": ("groups:2", "attention", "ffn", "none"),
        "groups:2": ("none",),
        "cycle:2": ("none", "pattern:1,0,1,2", "pattern:0,1,0,1/0,1,2,3"),
        "loop:1,1x2,1": ("none",),
    }.items(),
)
def test_less_sharing_computes_the_same_function(write_checkpoint, sharing, others):
    """A layer keeps its blocks."""
    folder, model = write_checkpoint(replace(DEEP, sharing=sharing))
    goal = states_of(model)
    for other in others:
        states = states_of(start(folder, replace(DEEP, sharing=other)))
        assert all(map(torch.equal, states, goal)), other


def test_blocks_that_would_have_to_become_one_are_refused(write_checkpoint):
    folder, _ = write_checkpoint(replace(DEEP, sharing="cycle:2"))
    for sharing in ("all", "cycle-rev:2", "groups:2", "attention"):
        with pytest.raises(UserError, match="would have to become one") as caught:
            read_initial(folder, replace(DEEP, sharing=sharing))
        assert f"--sharing {sharing}" in str(caught.value) and "\n" not in str(caught.value)


def test_another_depth_takes_the_blocks_of_the_same_relative_depth(write_checkpoint):
    folder, model = write_checkpoint(replace(SMALL, num_layers=2, sharing="none"))
    old = model.state_dict()
    name = "albert.encoder.ffn.{}.feed_forward.up.weight"
    for num_layers, origins in ((4, [0, 0, 1, 1]), (3, [0, 0, 1]), (1, [0])):
        new = read_initial(folder, replace(SMALL, num_layers=num_layers, sharing="none"))
        for layer, origin in enumerate(origins):
            assert torch.equal(new[name.format(layer)], old[name.format(origin)])
    grouped = read_initial(folder, replace(SMALL, num_layers=6, sharing="groups:2"))
    assert torch.equal(grouped[name.format(1)], old[name.format(1)])


def test_a_deep_model_becomes_a_loop_and_a_loop_another(write_checkpoint):
    """A loop takes the blocks at the relative depth of its layers when its core runs once."""
    folder, model = write_checkpoint(replace(SMALL, num_layers=8, sharing="none"))
    looped = replace(SMALL, num_layers=10, sharing="loop:1,2x4,1")
    loop = read_initial(folder, looped)
    name = "albert.encoder.attention.{}.self_attention.key.weight"
    for block, layer in enumerate((0, 2, 4, 6)):
        assert torch.equal(loop[name.format(block)], model.state_dict()[name.format(layer)])
    again, kept = write_checkpoint(looped, 1)
    fewer = read_initial(again, replace(SMALL, num_layers=6, sharing="loop:1,2x2,1"))
    assert all(torch.equal(fewer[name], x) for name, x in kept.state_dict().items())


def test_what_layers_of_a_loop_have_is_that_of_layers_with_their_blocks(write_checkpoint):
    """Norms are the blocks'; a loop of other runs takes what stands at the beginning of its own."""
    looped = replace(SMALL, num_layers=10, sharing="loop:1,2x4,1")
    folder, _ = write_checkpoint(replace(SMALL, num_layers=8, sharing="none"), is_trained=True)
    states = states_of(start(folder, replace(looped, per_layer="norm")))
    assert all(map(torch.equal, states, states_of(start(folder, looped))))
    looped = replace(looped, per_layer="inject,scale")
    fewer = replace(looped, num_layers=6, sharing="loop:1,2x2,1")
    folder, model = write_checkpoint(fewer, 1, is_trained=True)
    old, new = (x.albert.encoder.own for x in (model, start(folder, looped)))
    for layer, origin in enumerate((0, 1, 2, 1, 2, 3, 2, 3, 4, 5)):
        expected, taken = old[origin].state_dict(), new[layer].state_dict()
        assert taken.keys() == expected.keys()
        assert all(torch.equal(taken[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    "per_layer", ["inject", "norm", "scale", "position", "lora:2", "lora:2,norm"]
)
def test_what_is_added_to_layers_starts_as_nothing_and_is_taken_along(write_checkpoint, per_layer):
    folder, model = write_checkpoint(replace(DEEP, sharing="groups:2"))
    config = replace(DEEP, sharing="none", per_layer=per_layer)
    goal = states_of(model)
    more = start(folder, config)
    assert all(map(torch.equal, states_of(more), goal))
    if "lora" in per_layer:
        first = more.albert.encoder.own[3].ffn["up"].first
        assert 0 < first.abs().max() <= 2 * DEEP.initializer_range
    again, model = write_checkpoint(config, 5)
    deeper = start(again, replace(config, num_layers=8))
    name = "albert.encoder.own.{}."
    for layer in range(8):
        for key, tensor in deeper.state_dict().items():
            if name.format(layer) in key:
                old = key.replace(name.format(layer), name.format(layer // 2))
                assert torch.equal(tensor, model.state_dict()[old])
    with pytest.raises(UserError, match=f"has --per-layer {per_layer}, which a run with"):
        read_initial(again, replace(config, per_layer="none"))


def test_a_sentence_head_that_the_old_run_lacks_starts_anew(write_checkpoint):
    folder, model = write_checkpoint(replace(SMALL, pair_head=False), 1)
    started, again = (read_initial(folder, SMALL) for _ in range(2))
    heads = {"albert.pooler.weight", "albert.pooler.bias", "pair_head.weight", "pair_head.bias"}
    assert started.keys() == model.state_dict().keys() | heads
    for name, tensor in model.state_dict().items():
        assert torch.equal(started[name], tensor)
    for name in heads:
        assert torch.equal(started[name], again[name])
        assert bool(started[name].any()) == name.endswith("weight")
    AlbertForPretraining(SMALL).load_state_dict(started)


def test_a_sentence_loss_may_begin_late(data, tmp_path):
    first, run = tmp_path / "first", tmp_path / "run"
    given = dict(steps=1, save_every=1, eval_every=1)
    late = "has no sentence head; it starts from --seed"
    for output, flags in (
        (first, {"objective": "none"}),
        (tmp_path / "again", {"objective": "none", "init_from": first}),
        (run, {"init_from": first}),
    ):
        done = run_program(*train_command(data, output, **given, **flags))
        assert done.returncode == 0, done.stderr
        assert (late in done.stderr) == (output == run)
    losses = [r["sop_loss"] for r in read_lines(run / "metrics.jsonl") if "sop_loss" in r]
    assert losses and abs(losses[0] - log(2)) < 0.1


def test_what_does_not_fit_is_refused(write_checkpoint):
    folder, model = write_checkpoint(SMALL)
    headless = read_initial(folder, replace(SMALL, pair_head=False))
    heads = {n for n in model.state_dict() if n.startswith(("albert.pooler", "pair_head"))}
    assert headless.keys() == model.state_dict().keys() - heads
    for changes, words in (
        ({"num_heads": 2}, "its num_heads is 4, this run's is 2"),
        ({"embedding_size": 4}, "this run's is 4"),
    ):
        with pytest.raises(UserError, match=words):
            read_initial(folder, replace(SMALL, **changes))


def build_runs(rank: int, configs):
    """Of each run: the counts, the weights that it would save at step 0, and a moment."""
    from albert_ds.training.pretrain import start

    device, mesh = join(1)
    runs = []
    for config in configs:
        engine, state = start(config, mesh, device, ModelFolder(config.init_from))
        counts = (state.step, state.samples, state.updates)
        saved = (gather(engine, f"{kind}.safetensors") for kind in ("weights", "exp_avg"))
        runs.append((counts, *saved))
    return runs


def test_a_run_starts_at_step_0_with_a_fresh_optimizer(write_checkpoint, tmp_path):
    """In every stage and precision with the bits of the fp32 weights."""
    folder, _ = write_checkpoint(replace(DEEP, sharing="all"))
    model = replace(DEEP, sharing="groups:2", per_layer="norm,scale,position,lora:2")
    names = ("zero0_fp32", "zero1_fp32", "zero1_bf16", "zero2_bf16", "zero3_bf16")
    configs = [
        small_config(world_size=2, model=model, output=str(tmp_path / name), ds_file=f"{name}.json")
        for name in names
    ]
    configs = [replace(config, init_from=str(folder)) for config in configs]
    expected = read_initial(folder, model)
    assert any(not torch.equal(w.bfloat16().float(), w) for w in expected.values())
    for name, run in zip(names, run_ranks(build_runs, 2, configs)[0], strict=True):
        counts, weights, moments = run
        assert counts == (0, 0, 0)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected), name
        assert not any(moment.any() for moment in moments.values())
