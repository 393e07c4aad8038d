"""Weights are used with their own vocabulary only, never with another of the same size.

Every id would stand for another piece, and nothing but the results would show it.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import save_file

from albert_ds.data.vocab import MODEL_NAME, TOKENIZER_NAME, _parse, read_vocab
from albert_ds.errors import UserError
from albert_ds.interop.export import export_hf
from albert_ds.interop.weights import check_vocab, read_model_vocab
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.settings.pretrain import read_config
from albert_ds.settings.shared import write_config
from tests.conftest import train_command


def swap_pieces(path: Path) -> None:
    """Another vocabulary of the same size: the last two pieces change places."""
    proto = _parse(path.read_bytes())
    one, other = proto.pieces[-1], proto.pieces[-2]
    one.piece, other.piece = other.piece, one.piece
    path.write_bytes(proto.SerializeToString())


@pytest.fixture
def run(data, tmp_path) -> Path:
    """A run with one checkpoint, its vocabulary and what config.json records of it."""
    folder = tmp_path / "source"
    config = read_config(train_command(data, folder)[2:], world_size=2)
    vocab = read_vocab(data / MODEL_NAME)
    write_config(config, vocab_sha256=vocab.sha256)
    vocab.write(folder)
    step = folder / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    save_file(AlbertForPretraining(config.model, seed=0).state_dict(), step / "weights.safetensors")
    (step.parent / "latest").write_text(f"{step.name}\n")
    return folder


def uses(data: Path, run: Path) -> dict:
    from albert_ds.commands.fill_mask import fill_masks
    from albert_ds.commands.probe import open_model

    init = [*train_command(data, run.parent / "new")[2:], "--init-from", str(run)]
    return {
        "--init-from": lambda: read_config(init, world_size=2),
        "probe": lambda: open_model(run, read_vocab(data / MODEL_NAME), data, "cpu", None),
        "export": lambda: export_hf(run, run.parent / "exported"),
        "fill_mask": lambda: fill_masks(run, ["a [MASK] b"], 1),
        "finetune": lambda: read_model_vocab(run),
    }


@pytest.mark.parametrize("use", ["--init-from", "probe", "export", "fill_mask", "finetune"])
def test_a_replaced_vocabulary_is_refused(data, run, use):
    swap_pieces(run / MODEL_NAME)
    with pytest.raises(UserError, match="belong to another vocabulary"):
        uses(data, run)[use]()


@pytest.mark.parametrize("use", ["--init-from", "probe", "fill_mask"])
def test_its_own_vocabulary_is_accepted(data, run, use):
    uses(data, run)[use]()


@pytest.mark.parametrize("use", ["--init-from", "probe"])
def test_data_of_another_vocabulary_is_refused(data, run, use):
    # A run from before its vocabulary was recorded: the pieces are compared.
    config = json.loads((run / "config.json").read_text())
    del config["vocab_sha256"]
    (run / "config.json").write_text(json.dumps(config))
    swap_pieces(run / MODEL_NAME)
    with pytest.raises(UserError, match="as id 798"):
        uses(data, run)[use]()


def test_weights_without_a_vocabulary_are_accepted(data, run):
    for name in (MODEL_NAME, TOKENIZER_NAME):
        (run / name).unlink(missing_ok=True)
    check_vocab(run, read_vocab(data / MODEL_NAME), "run")


def test_training_records_its_vocabulary(data, tmp_path):
    from albert_ds.settings.pretrain import write_run_files

    config = read_config(train_command(data, tmp_path / "run")[2:], world_size=2)
    write_run_files(config)
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["vocab_sha256"]
    assert recorded == read_model_vocab_sha256(tmp_path / "run")
    assert "vocab_sha256" not in asdict(config)
    read_config(train_command(data, tmp_path / "run")[2:], world_size=2)  # resumes


def read_model_vocab_sha256(run: Path) -> str:
    return read_vocab(run / MODEL_NAME).sha256
