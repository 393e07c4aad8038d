"""The card of an export: metadata for the Hub, where the model is from, what is left open."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from albert_ds.base.errors import UserError
from albert_ds.commands.export import build_parser
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.task_heads import AlbertForTask, HeadConfig
from tests.finetuning import MODEL
from tests.models import run_export, write_run, write_weights


@pytest.fixture
def run(tmp_path, vocab) -> Path:
    """A run with one checkpoint, trained on shards in Norwegian, `no` for short."""
    data = tmp_path / "riksmål: 1"
    data.mkdir()
    train = {"documents": 1200, "samples": 34567, "tokens": 8901234}
    (data / "index.json").write_text(json.dumps({"language": "no", "splits": {"train": train}}))
    run = write_run(
        tmp_path / "run",
        AlbertForPretraining(MODEL),
        vocab,
        step=40,
        steps=80,
        batch_size=64,
        command="albert-ds train --steps 80",
        data=[str(data), "/gone/shards"],
        data_weights=[0.75, 0.25],
        stream={"objective": "sop", "sequence_length": 48},
        deepspeed={
            "optimizer": {"type": "Lamb", "params": {"lr": 0.00176}},
            "bf16": {"enabled": True},
        },
        versions={"torch": "2.11.0", "commit": "abc"},
    )
    lines = [{"step": s, "heldout_mlm_loss": 5.0 - s / 100} for s in (20, 40, 60)]
    lines.insert(1, {"step": 30, "loss": 1.0})
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 8')
    return run


def write_probe(path: Path, **values) -> Path:
    path.write_text(json.dumps({"weights": "run/step-00000040", "data": "news", **values}))
    return path


def test_the_hub_reads_the_metadata(run, tmp_path):
    probe = write_probe(tmp_path / "p.json", heldout_mlm_accuracy=0.5, most_frequent_piece="'\n")
    hf = run_export(run, tmp_path / "hf", "--license", "cc-by-sa-4.0", "--probe", probe)
    metadata = ModelCard.load(hf / "README.md").data
    assert (metadata.language, metadata.license) == (["no"], "cc-by-sa-4.0")
    assert (metadata.library_name, metadata.pipeline_tag) == ("transformers", "fill-mask")
    assert (metadata.tags, metadata.model_name) == (["albert"], "run")
    assert metadata.eval_results is not None
    measured = [(x.dataset_type, x.metric_type, x.metric_value) for x in metadata.eval_results]
    assert measured == [
        ("riksmål: 1", "heldout_mlm_loss", 4.6),
        ("news", "heldout_mlm_accuracy", 0.5),
    ]


def test_the_card_says_where_a_model_comes_from(run, tmp_path):
    card = (run_export(run, tmp_path / "hf") / "README.md").read_text()
    for words in (
        "exported from `run/step-00000040`",
        "in lower case; accents and combining marks are removed",
        "75.0% of the samples; 1,200 documents; 34,567 samples; 8,901,234 tokens",
        "25.0% of the samples; its index.json could not be read",
        "| optimizer | Lamb |",
        "| peak learning rate | 0.00176 |",
        "| precision | bf16 |",
        "| heldout_mlm_loss | 4.6000 |",
        "at step 40",
        "\n```bash\nalbert-ds train --steps 80\n```\n",
        "Checked at export: transformers ",
    ):
        assert words in card, words
    assert "4.4" not in card  # of step 60, after the checkpoint
    for line in ("of each layer's own | `none`", "attention block of each layer | 0, 0"):
        assert line in card
    assert not re.search(r"\n\n\n|[{}]{2}", card)


def test_the_card_says_what_was_written_differently(vocab, tmp_path):
    config = replace(MODEL, sharing="attention", embedding_size=32, pair_head=False)
    model = AlbertForPretraining(config)
    hf = run_export(write_run(tmp_path / "run", model, vocab), tmp_path / "hf")
    card = (hf / "README.md").read_text()
    assert f"{sum(p.numel() for p in model.parameters()):,}" in card
    assert "## Training" not in card  # config.json says nothing of it
    for words in ("run/step-00000001", "repeated", "identity", "random", "AutoModelForMaskedLM"):
        assert words in card


def test_text_of_files_is_shown_and_not_run(run, tmp_path):
    """A card is shown by viewers that do not sanitise HTML."""
    config = json.loads((run / "config.json").read_text())
    config["versions"]["commit"] = "abc<script>alert(1)</script> | x\n| y | z"
    (run / "config.json").write_text(json.dumps(config))
    odd = run.rename(run.with_name("a`<img src=x>"))
    card = (run_export(odd, tmp_path / "hf") / "README.md").read_text()
    assert "<script" not in card and "exported from `a'<img src=x>/step-" in card
    assert r"abc&lt;script>alert(1)&lt;/script> \| x \| y \| z |" in card


def test_what_nobody_said_is_marked_and_no_metadata(run, tmp_path):
    (tmp_path / "riksmål: 1" / "index.json").unlink()
    hf = run_export(run, tmp_path / "hf")
    card = ModelCard.load(hf / "README.md")
    assert card.data.license is None and card.data.language is None
    top, body = (hf / "README.md").read_text().split("\n---\n", 1)
    for name in ("license", "language"):
        assert re.search(rf"^# {name}: FILL IN", top, re.M), name
    carbon, licence = body.split("## Carbon")[1].split("## Licence")
    assert "**FILL IN**" in carbon and licence.strip().startswith("**FILL IN**")
    licensed = run_export(run, tmp_path / "licensed", "--license", "mit")
    card = ModelCard.load(licensed / "README.md").text
    assert card.split("## Licence")[1].strip() == "`mit`"


def test_a_probe_is_in_the_card_of_what_it_measured(run, tmp_path, capsys):
    write_weights(run, AlbertForPretraining(MODEL).state_dict(), step=60)
    probe = write_probe(tmp_path / "probe.json", heldout_mlm_accuracy=0.5, heldout_masked=7)
    run_export(run, tmp_path / "hf", "--probe", probe, "--revision-per-checkpoint")
    folders = [tmp_path / "hf" / f"step-000000{step}" for step in (40, 60)]
    assert capsys.readouterr().out == "".join(f"wrote {folder}\n" for folder in folders)
    cards = [(folder / "README.md").read_text() for folder in folders]
    assert ["| heldout_masked | 7 |" in card for card in cards] == [True, False]
    with pytest.raises(UserError, match="is about run/step-00000040; exported: run/step-00000060"):
        run_export(run, tmp_path / "hf2", "--probe", probe)
    probe.write_text('{"models": {}}')
    with pytest.raises(UserError, match='--probe .*probe.json: no "weights" in it'):
        run_export(run, tmp_path / "hf2", "--probe", probe)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="must be a run, with folders checkpoints/step-N"):
        run_export(run, tmp_path / "hf2", "--revision-per-checkpoint")


def test_numbers_of_other_weights_are_not_in_a_card(run, vocab, tmp_path):
    weights = AlbertForPretraining(MODEL).state_dict()
    write_weights(run, weights, step=60, average=weights)
    for words in (["--average"], ["--average-last", "2"]):
        card = run_export(run, tmp_path / words[0], *words) / "README.md"
        assert "heldout_mlm_loss" not in card.read_text()
    head = HeadConfig(kind="classification", num_labels=2, labels=("0", "1"))
    model = AlbertForTask(MODEL, head)
    facts = {"task": "glue/rte", "checkpoint": "pretrained", "from_task": "mnli"}
    tuned = write_run(tmp_path / "tuned", model, vocab, head=head, **facts)
    (tuned / "results.json").write_text('{"best_step": 7, "dev": {"accuracy": 0.7654}}')
    newest = write_weights(tuned, model.state_dict(), step=2)
    cards = [run_export(x, tmp_path / f"hf-{x.name}") / "README.md" for x in (tuned, newest)]
    assert ["0.7654" in card.read_text() for card in cards] == [True, False]
    for words in ("| started from | mnli |", "## Development set, at step 7\n"):
        assert words in cards[0].read_text()


def test_the_data_of_a_task_are_no_shards(run, vocab, tmp_path, monkeypatch):
    """The language of shards that happen to lie here is not that of a task elsewhere."""
    head = HeadConfig(kind="classification", num_labels=2, labels=("0", "1"))
    facts = {"task": "glue/rte", "data": "../glue/RTE"}
    tuned = write_run(tmp_path / "tuned", AlbertForTask(MODEL, head), vocab, head=head, **facts)
    monkeypatch.chdir(tmp_path / "riksmål: 1")
    assert ModelCard.load(run_export(tuned, tmp_path / "hf") / "README.md").data.language is None


@pytest.mark.parametrize("text", ["Apache 2.0", "MIT", "", "-"])
def test_a_licence_is_an_identifier(text):
    with pytest.raises(UserError, match="--license .*must be an identifier"):
        build_parser().parse_args(["export", f"--license={text}"])
