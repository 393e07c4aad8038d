"""A run written by an earlier version resumes and ends as it would have ended there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from albert_ds.checkpoint.model_folder import ModelFolder
from tests.command import run_on_rank
from tests.distributed import run_ranks
from tests.legs import pretrain, records
from tests.models import copy_old_run, run_export

DS_CONFIGS = {"adamw": "zero1_fp32_adamw.json", "lamb": "zero1_fp32.json"}
FLAGS = dict(num_heads=2, hidden_size=16, embedding_size=8, ffn_size=16, sequence_length=32)
FLAGS |= dict(learning_rate=0.01, warmup_steps=2, micro_batch_size=4, save_every=6)
FLAGS |= dict(max_position_embeddings=32)
# What a record says of training itself; the other keys depend on the clock or on the layout.
COMPARED = ("samples", "lr", "grad_norm", "loss", "heldout_loss", "heldout_masked")


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    return copy_old_run(tmp_path_factory.mktemp("old") / "runs")


@pytest.mark.parametrize("optimizer", DS_CONFIGS)
def test_an_old_run_resumes_to_the_result_of_the_uninterrupted_one(old, tmp_path, optimizer):
    run = shutil.copytree(old / optimizer, tmp_path / "run")
    expected = records(run)
    assert [record["step"] for record in expected][-2:] == [12, 12]
    ds_config = f"ds_configs/{DS_CONFIGS[optimizer]}"
    pretrain(old / "data", run, deepspeed_config=ds_config, **FLAGS)
    for before, after in zip(expected, records(run), strict=True):
        assert before["step"] == after["step"]
        for key in set(COMPARED) & before.keys():
            assert after[key] == pytest.approx(before[key], rel=1e-6), (after["step"], key)
    weights = load_file(run / "checkpoints" / "step-00000012" / "weights.safetensors")
    uninterrupted = load_file(old / f"{optimizer}-step-12.safetensors")
    torch.testing.assert_close(weights, uninterrupted, rtol=1e-6, atol=1e-7)
    # The comparison is of training and not of the checkpoint: the six steps moved every tensor.
    start = load_file(run / "checkpoints" / "step-00000006" / "weights.safetensors")
    assert not any(torch.equal(start[name], tensor) for name, tensor in weights.items())


def test_an_old_run_is_exported_and_probed(old, tmp_path):
    run = old / "adamw"
    run_export(run, tmp_path / "hf")
    config, exported = ModelFolder(tmp_path / "hf").read_pretrained()
    assert (config.vocab_size, config.num_layers, config.hidden_size) == (150, 2, 16)
    saved = load_file(run / "checkpoints" / "step-00000006" / "weights.safetensors")
    torch.testing.assert_close(exported, saved, rtol=0, atol=0)
    words = ["probe", "--checkpoint", run, "--data", old / "data", "--samples", 40]
    words += ["--head-samples", 80, "--output", tmp_path / "probe.json"]
    (done,) = run_ranks(run_on_rank, 1, words)
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "probe.json").read_text())
    assert 0 <= report["heldout_mlm_accuracy"] <= 1
