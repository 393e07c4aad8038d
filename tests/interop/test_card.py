"""The card of an export: metadata that the Hub reads, the command of the run, what is left open."""

import json
import re
import shlex
import shutil
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from albert_ds.commands.convert_hf import build_parser, main
from albert_ds.commands.probe import name_measured
from albert_ds.data.vocab import RELEASED, read_vocab, train_vocab
from albert_ds.errors import UserError
from albert_ds.interop.export import export_hf, list_checkpoints_of, read_probes
from albert_ds.interop.weights import name_weights
from albert_ds.settings import finetune as finetuning
from albert_ds.settings import pretrain as pretraining
from albert_ds.settings.shared import as_json
from tests.conftest import ROOT, train_command
from tests.finetuning import flags, write_checkpoint, write_cola


@pytest.fixture(scope="module")
def vocab(text_file):
    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    return train_vocab(lines, RELEASED, vocab_size=300)


@pytest.fixture
def run(tmp_path, vocab) -> Path:
    """A run with one checkpoint, trained on shards in Norwegian, `no` for short."""
    data = tmp_path / "riksmål: 1"
    data.mkdir()
    train = {"documents": 1200, "samples": 34567, "tokens": 8901234}
    (data / "index.json").write_text(json.dumps({"language": "no", "splits": {"train": train}}))
    folder = write_checkpoint(tmp_path / "run", vocab)
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(record | {"data": [str(data)]}))
    line = {"step": 1, "heldout_mlm_loss": 5.5, "heldout_mlm_accuracy": 0.25}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def write_probe(path: Path, **values) -> Path:
    path.write_text(json.dumps({"weights": "run/step-00000001", "data": "news", **values}))
    return path


def test_the_hub_reads_the_metadata(run, tmp_path):
    probe = write_probe(tmp_path / "p.json", heldout_mlm_accuracy=0.5, most_frequent_piece="'\n")
    export_hf(run, tmp_path / "hf", licence="cc-by-sa-4.0", probes=read_probes([probe], [run]))
    found = ModelCard.load(tmp_path / "hf" / "README.md").data
    assert (found.language, found.license) == (["no"], "cc-by-sa-4.0")
    assert (found.library_name, found.pipeline_tag, found.tags) == (
        "transformers",
        "fill-mask",
        ["albert"],
    )
    assert found.model_name == "run" and found.eval_results is not None
    measured = [(x.dataset_type, x.metric_type, x.metric_value) for x in found.eval_results]
    assert measured == [
        ("riksmål: 1", "heldout_mlm_loss", 5.5),
        ("riksmål: 1", "heldout_mlm_accuracy", 0.25),
        ("news", "heldout_mlm_accuracy", 0.5),
    ]


def test_what_nobody_said_is_marked_and_no_metadata(run, tmp_path):
    (tmp_path / "riksmål: 1" / "index.json").unlink()
    export_hf(run, tmp_path / "hf")
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert card.data.license is None and card.data.language is None
    assert "co2_eq_emissions" not in card.data
    top, body = (tmp_path / "hf" / "README.md").read_text().split("\n---\n", 1)
    for name in ("license", "language", "co2_eq_emissions"):
        assert re.search(rf"^# {name}: FILL IN", top, re.M), name
    carbon, licence = body.split("## Carbon")[1].split("## Licence")
    assert carbon.count("| **FILL IN** |") == 3 and licence.strip().startswith("**FILL IN**")
    assert "## Training" not in body  # config.json says nothing of it
    export_hf(run, tmp_path / "hf", licence="mit")
    card = ModelCard.load(tmp_path / "hf" / "README.md").text
    assert card.split("## Licence")[1].strip() == "`mit`"


def test_a_probe_is_in_the_card_of_what_it_measured(run, tmp_path):
    old = run / "checkpoints" / "step-00000001"
    new = old.with_name("step-00000002")
    new.mkdir()
    (new / "weights.safetensors").write_bytes((old / "weights.safetensors").read_bytes())
    assert list_checkpoints_of(run) == [old, new]
    probe = write_probe(tmp_path / "probe.json", heldout_mlm_accuracy=0.5, heldout_masked=7)
    probes = read_probes([probe], [old, new])
    for checkpoint, times in ((old, 1), (new, 0)):
        export_hf(checkpoint, tmp_path / "hf", probes=probes)
        card = (tmp_path / "hf" / "README.md").read_text()
        assert card.count("| heldout_masked | 7 |") == times
    with pytest.raises(UserError, match="is about run/step-00000001; exported: run/step-00000002"):
        read_probes([probe], [new])
    assert name_weights(tmp_path / "hf") == "hf"
    (tmp_path / "probe.json").write_text('{"models": {}}')
    with pytest.raises(UserError, match='--probe .*probe.json: no "weights" in it'):
        read_probes([probe], [new])


def test_a_run_without_checkpoints_has_no_revisions(tmp_path):
    with pytest.raises(UserError, match="must be a run, with folders checkpoints/step-N"):
        list_checkpoints_of(tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model": "bert-base", "num_heads": 4, "sharing": "groups:2", "per_layer": "norm,scale"},
        {"objective": "none", "compile": True, "dropout": "0.0"},
        {"seed": 7, "depth_schedule": "1@0,2@50%", "learning_rate": "0.003", "max_hours": "1.5"},
        {"data": ["data", "other data"], "data_weights": ["3", "1"], "max_predictions": 9},
    ],
    ids=lambda given: next(iter(given), "plain"),
)
def test_the_command_of_a_pretraining_run_gives_the_same_run(data, tmp_path, monkeypatch, given):
    for name in ("data", "other data"):
        (tmp_path / name).symlink_to(data)
    (tmp_path / "zero1_fp32.json").symlink_to(ROOT / "ds_configs" / "zero1_fp32.json")
    monkeypatch.chdir(tmp_path)
    values = {"data": "data", "output": "run", "deepspeed_config": "zero1_fp32.json"} | given
    switch = ["--compile"] if values.pop("compile", False) else []
    argv = [*train_command(**values)[2:], *switch]
    typed = pretraining.read_config(argv, world_size=2)
    program, command, *again = shlex.split(pretraining.describe_command(as_json(typed)))
    assert (program, command) == ("albert-ds", "train")
    assert pretraining.read_config(again, world_size=2) == typed


def test_folders_of_the_machine_are_not_in_the_command(data, tmp_path):
    argv = train_command(data, tmp_path / "run")[2:]
    command = pretraining.describe_command(as_json(pretraining.read_config(argv, world_size=1)))
    assert str(tmp_path) not in command and str(data.parent) not in command
    assert f"--data {data.name} " in command


def test_the_command_of_a_fine_tuning_run_gives_the_same_run(vocab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "run", vocab)
    write_cola(tmp_path / "cola")
    (tmp_path / "zero1_fp32_adamw.json").symlink_to(ROOT / "ds_configs" / "zero1_fp32_adamw.json")
    given = {"sequence_length": 48, "patience": 3, "classifier_dropout": 0.25, "seed": 5}

    def read(argv):
        config, args = finetuning.read_config(argv, world_size=1)
        return finetuning.resolve_steps(config, args, examples=96)

    where = (Path("cola"), Path("run"), Path("tuned"))
    typed = read(flags("glue/cola", *where, **given, deepspeed_config="zero1_fp32_adamw.json"))
    program, command, *again = shlex.split(finetuning.describe_command(as_json(typed)))
    assert (program, command) == ("albert-ds", "finetune")
    assert replace(read(again), cache=typed.cache) == typed


def test_the_card_shows_the_command(run, data, tmp_path):
    argv = train_command(data, tmp_path / "other")[2:]
    typed = pretraining.read_config(argv, world_size=1)
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**as_json(typed), "model": record["model"]}))
    export_hf(run, tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "\n```bash\nalbert-ds train --output other --steps 12 " in card
    assert asdict(typed.model) != record["model"] and "--max-position-embeddings 64 " in card


def test_the_commands_bring_a_probe_into_the_card_of_its_checkpoint(data, tmp_path, capsys):
    vocab = read_vocab(data / "spiece.model")
    run = write_checkpoint(tmp_path / "run", vocab, vocab_size=vocab.size)
    first = run / "checkpoints" / "step-00000001"
    shutil.copytree(first, first.with_name("step-00000002"))
    report = tmp_path / "probe.json"
    measured = {**name_measured(Namespace(checkpoint=run, data=data, num_layers=None)), "x": 0.5}
    report.write_text(json.dumps(measured))
    words = ["export", "--checkpoint", str(run), "--output", str(tmp_path / "hf")]
    words += ["--license", "apache-2.0", "--probe", str(report)]
    main([*words, "--revision-per-checkpoint"])
    folders = [tmp_path / "hf" / f"step-0000000{number}" for number in (1, 2)]
    assert capsys.readouterr().out == "".join(f"wrote {folder}\n" for folder in folders)
    cards = [ModelCard.load(folder / "README.md") for folder in folders]
    assert [card.data.license for card in cards] == ["apache-2.0"] * 2
    assert ["| x | 0.5000 |" in card.text for card in cards] == [True, False]
    shallow = name_measured(Namespace(checkpoint=run, data=data, num_layers=1))
    report.write_text(json.dumps(shallow))
    with pytest.raises(UserError, match="is about run/step-00000001, 1 layers; exported: run/st"):
        main(words)


@pytest.mark.parametrize("text", ["Apache 2.0", "MIT", "", "-"])
def test_a_licence_is_an_identifier(text):
    with pytest.raises(UserError, match="--license .*must be an identifier"):
        build_parser().parse_args(["export", f"--license={text}"])
