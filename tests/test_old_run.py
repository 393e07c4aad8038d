"""A run written by an earlier version is read; with dropout it would draw other numbers now."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from albert_ds.checkpoint.model_folder import ModelFolder
from tests.command import run_on_rank
from tests.distributed import run_ranks
from tests.models import copy_old_run, run_export


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    return copy_old_run(tmp_path_factory.mktemp("old") / "runs")


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
    found = json.loads((tmp_path / "probe.json").read_text())
    assert 0 <= found["heldout_mlm_accuracy"] <= 1
