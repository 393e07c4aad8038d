"""Exports are compared with transformers before they are kept; folders are written whole."""

import json
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from albert_ds.base.errors import MachineFailed, UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.interop import check, export
from albert_ds.model import hugging_face
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.vocab.vocab import Vocab
from tests.finetuning import MODEL
from tests.models import run_export, run_import, shake, write_run

CONFIG = replace(MODEL, num_layers=4, sharing="none")


@pytest.fixture
def make_run(tmp_path, vocab):
    def make(**changes):
        model = shake(AlbertForPretraining(replace(CONFIG, **changes)))
        return write_run(tmp_path / "run", model, vocab)

    return make


def spoil(name):
    def change(config, state):
        state[name] = state[name] + 0.01 * torch.randn(state[name].shape)

    return change


GROUP = "albert.encoder.albert_layer_groups"
SPOILERS = {
    "embedding": (
        spoil("albert.embeddings.position_embeddings.weight"),
        "its prediction_logits differ from ours by ",
    ),
    "first layer": (
        spoil(f"{GROUP}.0.albert_layers.0.attention.dense.weight"),
        "its prediction_logits differ",
    ),
    "last layer": (
        spoil(f"{GROUP}.3.albert_layers.0.ffn.bias"),
        "its prediction_logits differ",
    ),
    "words": (spoil("predictions.bias"), "its prediction_logits differ"),
    "pairs": (spoil("sop_classifier.classifier.weight"), "its sop_logits differ from ours by "),
    "pooler": (spoil("albert.pooler.bias"), "its sop_logits differ"),
    "erf": (lambda config, _: config.update(hidden_act="gelu"), "its prediction_logits differ"),
    "too few": (lambda _, state: state.pop("albert.pooler.bias"), "its sop_logits differ"),
    "not finite": (
        lambda _, state: state["predictions.bias"].fill_(float("nan")),
        "its prediction_logits differ from ours by nan",
    ),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_an_export_that_computes_something_else_is_refused(
    make_run, tmp_path, monkeypatch, spoiler
):
    change, words = SPOILERS[spoiler]
    run = make_run(per_layer="position")

    def to_hf(config, state):
        hf_config, hf_state = hugging_face.to_hf(config, state)
        hf_state = {name: tensor.clone() for name, tensor in hf_state.items()}
        torch.manual_seed(0)
        change(hf_config, hf_state)
        return hf_config, hf_state

    monkeypatch.setattr(export, "to_hf", to_hf)
    with pytest.raises(UserError, match=words) as caught:
        run_export(run, tmp_path / "hf")
    assert "\n" not in str(caught.value) and str(run) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_hugging_face_has_no_place_for_is_refused(make_run, tmp_path):
    with pytest.raises(UserError, match="--per-layer inject: .*embedded.* has no place") as caught:
        run_export(make_run(sharing="all", per_layer="inject"), tmp_path / "hf")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("name", ["do_lower_case", "keep_accents"])
def test_a_tokenizer_with_other_ids_is_refused(make_run, tmp_path, monkeypatch, name):
    run = make_run()
    write = Vocab.write

    def write_wrongly(self, folder):
        write(self, folder)
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        path.write_text(json.dumps(settings | {name: not settings[name]}))

    monkeypatch.setattr(Vocab, "write", write_wrongly)
    with pytest.raises(UserError, match="its tokenizer encodes "):
        run_export(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_refused_export_leaves_the_older_one_alone(make_run, tmp_path, monkeypatch):
    run = make_run()
    run_export(run, tmp_path / "hf")
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    monkeypatch.setattr(check, "compare_token_ids", lambda *_: "it differs")
    with pytest.raises(UserError, match="--checkpoint .*: not exported: it differs"):
        run_export(run, tmp_path / "hf")
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    monkeypatch.undo()
    run_export(run, tmp_path / "hf")
    assert (tmp_path / "hf" / "notes.txt").read_text() == "mine"


def test_a_disk_that_is_full_is_one_line(make_run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    run = make_run()
    monkeypatch.setattr(export, "save_file", fail)
    with pytest.raises(MachineFailed, match=r"model.safetensors: cannot be written: .*No space"):
        run_export(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_weights_in_bf16_are_the_rounded_ones_and_load_in_fp32(make_run, tmp_path):
    run = make_run(per_layer="scale")
    exact = load_file(run_export(run, tmp_path / "fp32") / "model.safetensors")
    folder = run_export(run, tmp_path / "bf16", "--precision", "bf16")
    written = load_file(folder / "model.safetensors")
    assert {x.dtype for x in written.values()} == {torch.bfloat16}
    assert all(torch.equal(written[name], x.bfloat16()) for name, x in exact.items())
    model = transformers.AutoModelForPreTraining.from_pretrained(folder)
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    assert {x.dtype for x in ModelFolder(folder).read_weights().values()} == {torch.float32}
    card = (folder / "README.md").read_text()
    assert re.search(
        r"\(bf16\), in float64 and for random ids, logits that differ from ours by 0\.00\d+ ", card
    )


def test_rounding_that_changes_what_the_model_says_is_refused(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(Tensor, "bfloat16", lambda x: x.to(torch.float8_e5m2).to(torch.bfloat16))
    with pytest.raises(
        UserError,
        match="logits differ from ours by .* of their size; --precision fp32 rounds nothing",
    ):
        run_export(make_run(), tmp_path / "hf", "--precision", "bf16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("place", [".", "./", "../hf"])
def test_an_export_into_the_folder_where_one_stands(make_run, tmp_path, monkeypatch, place):
    run = make_run()
    (tmp_path / "hf").mkdir()
    monkeypatch.chdir(tmp_path / "hf")
    run_export(run, Path(place))
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run"}


def test_the_commands_print_where_they_wrote_and_all_who_may_can_read_it(
    make_run, tmp_path, capsys
):
    run_export(make_run(), tmp_path / "hf")
    run_import(tmp_path / "hf", tmp_path / "back")
    written = [tmp_path / "hf", tmp_path / "back", tmp_path / "back" / "spiece.model"]
    assert capsys.readouterr().out == "".join(f"wrote {path}\n" for path in written)
    assert written[-1].is_file()
    (tmp_path / "plain").touch()
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    for folder in written[:2]:
        for path in folder.rglob("*"):
            assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) == usual, path


def test_without_transformers_the_export_says_that_it_was_not_checked(
    make_run, tmp_path, monkeypatch, capsys
):
    run = make_run()
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    run_export(run, tmp_path / "hf")
    assert "transformers is not installed" in capsys.readouterr().err
    assert "Not checked: " in (tmp_path / "hf" / "README.md").read_text()
