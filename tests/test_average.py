"""Averaged weights: what they are in every layout, and the commands that read them."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.commands import fill_mask
from albert_ds.model.albert import AlbertForPretraining
from tests.command import run_command
from tests.distributed import run_ranks
from tests.finetuning import MODEL, flags, tune_ranks
from tests.models import folder_of, run_export, shake, write_run, write_weights
from tests.optim import muon
from tests.runs import gather, open_small_run, small_batches, small_config, take_step

DECAY = 0.7
BATCHES = small_batches(4, max_length=24)


def train(rank: int, configs: list) -> list[tuple[list[dict], dict]]:
    """For each config the weights after every step, and the average after the last."""
    outcomes = []
    for config in configs:
        run = open_small_run(config, BATCHES)
        weights = []
        for _ in BATCHES:
            take_step(run)
            weights.append(gather(run.engine))
        outcomes.append((weights, gather(run.engine, "average.safetensors")))
    return outcomes


@pytest.mark.parametrize(("tensor_parallel", "world_size"), [(1, 2), (2, 2)])
def test_each_step_counts_less_than_the_next(tensor_parallel, world_size):
    layout = dict(world_size=world_size, tensor_parallel=tensor_parallel)
    modes = [("fp32", stage) for stage in (0, 1, 2, 3)] + [("bf16", stage) for stage in (1, 2, 3)]
    configs = [small_config(ds_file=f"zero1_{kind}.json", stage=n, **layout) for kind, n in modes]
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    configs += [small_config(ds_changes=changes, **layout) for changes in (muon.DS_CHANGES, adamw)]
    shares = torch.tensor([DECAY**3, DECAY**2, DECAY, 1.0], dtype=torch.float64)
    shares /= shares.sum()
    averaged = [replace(config, average=DECAY) for config in configs]
    for weights, average in run_ranks(train, world_size, averaged)[0]:
        for name, tensor in average.items():
            steps = torch.stack([w[name].double() for w in weights], dim=-1)
            torch.testing.assert_close(tensor.double(), steps @ shares, rtol=1e-6, atol=1e-7)
            assert not torch.equal(tensor, weights[-1][name])


@pytest.fixture
def run(vocab, tmp_path):
    """Two checkpoints, each of other weights and another average."""
    models = [shake(AlbertForPretraining(MODEL, seed=seed)).state_dict() for seed in range(4)]
    folder = write_run(tmp_path / "run", AlbertForPretraining(MODEL), vocab, average=DECAY)
    for step, weights, average in ((1, *models[:2]), (2, *models[2:])):
        write_weights(folder, weights, step, average=average)
    return folder, models


def exported(folder, output, *words) -> dict:
    run_export(folder, output, *words)
    return ModelFolder(output).read_pretrained()[1]


def test_an_export_has_the_average_or_the_mean_of_checkpoints(run, tmp_path):
    folder, models = run
    averaged = exported(folder, tmp_path / "averaged", "--average")
    assert all(torch.equal(averaged[name], tensor) for name, tensor in models[3].items())
    assert "step-00000002, average" in (tmp_path / "averaged" / "README.md").read_text()
    run_export(folder, tmp_path / "all", "--average", "--revision-per-checkpoint")
    first = ModelFolder(tmp_path / "all" / "step-00000001").read_pretrained()[1]
    assert all(torch.equal(first[name], tensor) for name, tensor in models[1].items())
    mean = exported(folder, tmp_path / "mean", "--average-last", 2)
    for name, tensor in mean.items():
        middle = (models[0][name].double() + models[2][name].double()) / 2
        torch.testing.assert_close(tensor, middle.float(), rtol=0, atol=0)
    plain = exported(folder, tmp_path / "plain", "--average-last", 1)
    assert all(torch.equal(plain[name], tensor) for name, tensor in models[2].items())


def test_every_reader_takes_it(run, cola, tmp_path, capsys, data):
    folder, models = run
    alone = write_run(tmp_path / "alone", AlbertForPretraining(MODEL), ModelFolder(folder).vocab)
    write_weights(alone, models[3])
    sentence = "the [MASK] is [MASK]"
    shown = []
    for words in ((str(folder), "--average"), (str(alone),), (str(folder),)):
        fill_mask.main(["--checkpoint", *words, sentence])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    out = tmp_path / "tuned"
    argv = flags("glue/cola", cola, folder, out, steps=1, learning_rate=0) + ["--average"]
    assert run_ranks(tune_ranks, 1, argv) == [0]
    tuned = load_file(out / "checkpoints" / "best" / "weights.safetensors")
    encoder = {name for name in tuned if name.startswith("albert.")}
    assert encoder and all(torch.equal(tuned[name], models[3][name]) for name in encoder)


def test_what_has_no_average_is_refused(run, cola, tmp_path):
    folder, _ = run
    hf = run_export(folder, tmp_path / "hf")
    output = tmp_path / "out"
    without = write_run(tmp_path / "without", AlbertForPretraining(MODEL))
    export = ("export", "--output", output, "--checkpoint")
    last = "--average-last"
    tuning = ("finetune", *flags("glue/cola", cola, folder, output))
    for words, says in (
        ((*export, hf, "--average"), "has no averaged weights"),
        ((*export, without, "--average"), "has no averaged weights"),
        ((*export, folder, last, 3), "has 2"),
        ((*export, folder_of(folder, 2), last, 2), "has 0"),
        ((*export, hf, last, 2), "has 0"),
        ((*export, folder, last, 2, "--average"), "not with --average"),
        (("fill-mask", "--checkpoint", hf, "--average", "[MASK]"), "no averaged weights"),
        (
            ("probe", "--checkpoint", folder, "--data", "x", "--similarity", "--average"),
            "not with --similarity",
        ),
        ((*tuning, "--average", "--from-scratch"), "not with another"),
    ):
        done = run_command(*words)
        assert done.code == 2 and says in done.err and done.err.count("\n") == 1, done
    assert not output.exists()
