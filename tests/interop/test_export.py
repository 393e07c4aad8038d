"""Exports are compared with transformers before they are kept; folders are written whole."""

import json
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from albert_ds.commands.convert_hf import main
from albert_ds.data.vocab import RELEASED, train_vocab
from albert_ds.errors import UserError
from albert_ds.interop import export as convert
from albert_ds.interop import hugging_face
from albert_ds.interop.export import export_hf, import_hf
from albert_ds.interop.weights import read_model_vocab, read_weights
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import HeadConfig
from albert_ds.model.task_heads import AlbertForTask
from tests.batches import concatenate, random_samples
from tests.finetuning import MODEL

CONFIG = replace(MODEL, num_layers=4, sharing="none")
# Hugging Face's groups express the first two only.
PLANS = (
    "pattern:0,0,1,1",
    "pattern:1,1,0,0",
    "none",
    "cycle:2",
    "cycle-rev:2",
    "pattern:0,0,0,1",
    "pattern:0,0,1,1/0,1,0,1",
)
GROUPS = dict.fromkeys(PLANS[:2], 2)
OWN = ("norm", "scale", "position", "lora:3", "norm,scale,position,lora:3")


@pytest.fixture(scope="module")
def vocab(text_file):
    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    return train_vocab(lines, RELEASED, vocab_size=300)


@pytest.fixture
def make_run(tmp_path, vocab):
    """A function (config, head) -> (a run as training leaves it, its model)."""

    def make(config=CONFIG, head=None, **record):
        run = tmp_path / "run"
        model = AlbertForPretraining(config) if head is None else AlbertForTask(config, head)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        step = run / "checkpoints" / ("step-00000040" if head is None else "best")
        step.mkdir(parents=True)
        save_file(model.state_dict(), step / "weights.safetensors")
        (step.parent / "latest").write_text(step.name + "\n")
        content = {"model": asdict(config), **record}
        if head is not None:
            content |= {"task": "glue/rte", "head": asdict(head)}
        (run / "config.json").write_text(json.dumps(content))
        vocab.write(run)
        return run, model.eval()

    return make


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_of_sharing_computes_the_same_there(make_run, tmp_path, plan):
    from transformers import AutoModel

    run, model = make_run(replace(CONFIG, sharing=plan))
    export_hf(run, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["num_hidden_groups"] == GROUPS.get(plan, 4)
    batch = concatenate(random_samples(1, vocab_size=300, max_length=40, seed=0)).tensors
    inputs = {k: v for k, v in batch.items() if "masked" not in k and "pair" not in k}
    theirs = AutoModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        ours = model.albert(**inputs)["hidden_states"]
        found = theirs(
            input_ids=inputs["input_ids"][None],
            token_type_ids=inputs["token_type_ids"][None],
            output_hidden_states=True,
        ).hidden_states
    for x, y in zip(ours, found, strict=True):
        torch.testing.assert_close(y[0], x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", ["cycle:2", "pattern:0,0,1,1/0,1,0,1"])
@pytest.mark.parametrize("kind", ["classification", "span"])
def test_a_task_model_of_any_plan_is_exported_alike(make_run, tmp_path, plan, kind):
    labels = ("entailment", "not_entailment") if kind == "classification" else ()
    head = HeadConfig(kind=kind, num_labels=2, labels=labels)
    run, _ = make_run(replace(CONFIG, sharing=plan, pair_head=head.reads_pooled), head)
    export_hf(run, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_hidden_groups"] == 4
    assert "repeated" in (tmp_path / "hf" / "README.md").read_text()


def test_groups_that_hugging_face_would_read_otherwise_are_refused(make_run, tmp_path, monkeypatch):
    """The distinct layers in order, which are no groups of neighbours here."""
    run, _ = make_run(replace(CONFIG, sharing="cycle:2"))
    monkeypatch.setattr(hugging_face, "list_groups", lambda config: [(0, 0), (1, 1)])
    with pytest.raises(UserError, match="the hidden states differ first in layer 2 of 4"):
        export_hf(run, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def spoil(name):
    def change(config, state):
        state[name] = state[name] + 0.01 * torch.randn(state[name].shape)

    return change


GROUP = "albert.encoder.albert_layer_groups"
SPOILERS = {
    "embedding": (
        spoil("albert.embeddings.position_embeddings.weight"),
        "the hidden states differ first in the embedding",
    ),
    "first layer": (
        spoil(f"{GROUP}.0.albert_layers.0.attention.dense.weight"),
        "differ first in layer 1 of 4",
    ),
    "last layer": (
        spoil(f"{GROUP}.3.albert_layers.0.ffn.bias"),
        "differ first in layer 4 of 4",
    ),
    "words": (spoil("predictions.bias"), "its prediction_logits differ .* so the head differs"),
    "pairs": (spoil("sop_classifier.classifier.weight"), "its sop_logits differ by .*, over 1e-05"),
    "pooler": (spoil("albert.pooler.bias"), "its sop_logits differ .* so the head differs"),
    "erf": (lambda config, _: config.update(hidden_act="gelu"), "differ first in layer 1 of 4"),
    "too few": (lambda _, state: state.pop("albert.pooler.bias"), "missing keys: albert.pooler.b"),
    "not finite": (
        lambda _, state: state["predictions.bias"].fill_(float("nan")),
        "its prediction_logits differ by inf",
    ),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_an_export_that_computes_something_else_is_refused(
    make_run, tmp_path, monkeypatch, spoiler
):
    change, words = SPOILERS[spoiler]
    run, _ = make_run(replace(CONFIG, per_layer="position"))

    def to_hf(config, state):
        hf_config, hf_state = hugging_face.to_hf(config, state)
        hf_state = {name: tensor.clone() for name, tensor in hf_state.items()}
        torch.manual_seed(0)
        change(hf_config, hf_state)
        return hf_config, hf_state

    monkeypatch.setattr(convert, "to_hf", to_hf)
    with pytest.raises(UserError, match=words) as caught:
        export_hf(run, tmp_path / "hf")
    assert "\n" not in str(caught.value) and str(run) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("name", ["do_lower_case", "keep_accents"])
def test_a_tokenizer_with_other_ids_is_refused(make_run, tmp_path, monkeypatch, name):
    run, _ = make_run()
    write = convert._write_tokenizer

    def write_wrongly(vocab, config, folder):
        write(vocab, config, folder)
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        path.write_text(json.dumps(settings | {name: not settings[name]}))

    monkeypatch.setattr(convert, "_write_tokenizer", write_wrongly)
    with pytest.raises(UserError, match="its tokenizer encodes "):
        export_hf(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_refused_export_leaves_the_older_one_alone(make_run, tmp_path, monkeypatch):
    run, _ = make_run()
    export_hf(run, tmp_path / "hf")
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    monkeypatch.setattr(convert, "_check_model", lambda *_: "it differs")
    with pytest.raises(UserError, match="not exported: it differs"):
        export_hf(run, tmp_path / "hf")
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    monkeypatch.undo()
    export_hf(run, tmp_path / "hf")
    assert (tmp_path / "hf" / "notes.txt").read_text() == "mine"


def test_files_can_be_read_by_all_who_may(make_run, tmp_path):
    run, _ = make_run()
    export_hf(run, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "back")
    (tmp_path / "plain").touch()
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    for folder in ("hf", "back"):
        for path in (tmp_path / folder).rglob("*"):
            assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) == usual, path


def test_without_transformers_the_export_says_that_it_was_not_checked(
    make_run, tmp_path, monkeypatch, capsys
):
    run, _ = make_run()
    monkeypatch.setattr(convert, "find_spec", lambda name: None)
    export_hf(run, tmp_path / "hf")
    assert "transformers is not installed" in capsys.readouterr().err
    assert "Not checked: " in (tmp_path / "hf" / "README.md").read_text()


def test_what_transformers_5_saves_is_imported(make_run, vocab, tmp_path):
    """It leaves tokenizer.json and no spiece.model."""
    from transformers import AutoModelForPreTraining, AutoTokenizer

    run, model = make_run(replace(CONFIG, sharing="groups:2"))
    export_hf(run, tmp_path / "hf")
    saved = tmp_path / "saved"
    AutoModelForPreTraining.from_pretrained(tmp_path / "hf").save_pretrained(saved)
    AutoTokenizer.from_pretrained(tmp_path / "hf").save_pretrained(saved)
    assert not (saved / "spiece.model").exists()
    import_hf(saved, tmp_path / "back")
    config, state = read_weights(tmp_path / "back")
    assert config == replace(CONFIG, sharing="groups:2")
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)
    texts = ["The object's class (its type).", "CAF\u00c9 \u201cx\u201d, 2,024"]
    assert read_model_vocab(tmp_path / "back").encode(texts) == vocab.encode(texts)
    assert read_model_vocab(saved).encode(texts) == vocab.encode(texts)


def test_the_layout_of_the_hub_is_imported(make_run, vocab, tmp_path):
    """config.json, the weights and spiece.model, and no file about the tokenizer."""
    run, _ = make_run()
    export_hf(run, tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md"):
        (tmp_path / "hf" / name).unlink()
    import_hf(tmp_path / "hf", tmp_path / "back")
    assert read_model_vocab(tmp_path / "back").encode(["An Object"]) == vocab.encode(["An Object"])


@pytest.mark.parametrize("plan", ["cycle:2", "cycle-rev:2", "attention", PLANS[-1]])
def test_sharing_that_is_written_as_repeated_blocks_is_read_back(make_run, tmp_path, caplog, plan):
    run, model = make_run(replace(CONFIG, sharing=plan))
    export_hf(run, tmp_path / "hf")
    config, state = read_weights(tmp_path / "hf")
    assert config.sharing == plan and f"read as --sharing {plan}" in caplog.text
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("per_layer", OWN)
@pytest.mark.parametrize("embedding_size", [16, 32])
def test_what_layers_have_of_their_own_is_folded_into_their_blocks(
    make_run, tmp_path, per_layer, embedding_size
):
    """Exporting compares all logits in float64."""
    config = replace(CONFIG, sharing="all", per_layer=per_layer, embedding_size=embedding_size)
    run, _ = make_run(replace(config, num_layers=11))  # file names sort 10 before 2
    export_hf(run, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_hidden_groups"] == 11
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"`{per_layer}`" in card and "`all`: one attention block for all 11 layers" in card


def test_groups_written_a_layer_at_a_time_are_recognised(make_run, tmp_path):
    run, model = make_run(replace(CONFIG, sharing="groups:2"))
    export_hf(run, tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    layers = {name: x for name, x in state.items() if not name.startswith(GROUP)}
    for layer in range(4):
        for name, x in state.items():
            if name.startswith(f"{GROUP}.{layer // 2}."):
                layers[name.replace(f"{GROUP}.{layer // 2}.", f"{GROUP}.{layer}.")] = x.clone()
    save_file(layers, tmp_path / "hf" / "model.safetensors")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_groups": 4}))
    config, found = read_weights(tmp_path / "hf")
    assert config.sharing == "groups:2"
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=0)


def test_the_card_says_where_a_model_comes_from(make_run, tmp_path):
    data = tmp_path / "shards"
    data.mkdir()
    train = {"documents": 1200, "samples": 34567, "tokens": 8901234}
    index = {"language": "ko", "splits": {"train": train}}
    (data / "index.json").write_text(json.dumps(index))
    optimizer = {"type": "Lamb", "params": {"lr": 0.00176}}
    run, _ = make_run(
        steps=80,
        batch_size=64,
        warmup_steps=2,
        data=[str(data), "/gone/shards"],
        data_weights=[0.75, 0.25],
        stream={"objective": "sop", "sequence_length": 48},
        deepspeed={"optimizer": optimizer, "bf16": {"enabled": True}},
        versions={"torch": "2.11.0", "commit": "abc"},
    )
    lines = [{"step": s, "heldout_mlm_loss": 5.0 - s / 100} for s in (20, 40, 60)]
    lines.insert(1, {"step": 30, "loss": 1.0})
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 8')
    export_hf(run, tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    for words in (
        'language: ["ko"]',
        "# license: FILL IN",
        "4 attention blocks, one a layer; 4 feed-forward blocks, one a layer",
        "in lower case; accents and combining marks are removed",
        "75.0% of the samples; 1,200 documents; 34,567 samples; 8,901,234 tokens",
        "25.0% of the samples; its index.json could not be read",
        "| optimizer | Lamb |",
        "| precision | bf16 |",
        "| heldout_mlm_loss | 4.6000 |",
        "at step 40",
        "Checked at export: transformers ",
    ):
        assert words in card, words
    assert "4.4" not in card  # of step 60, after the checkpoint


def test_the_command_prints_where_it_wrote(make_run, tmp_path, capsys):
    run, _ = make_run()
    main(["export", "--checkpoint", str(run), "--output", str(tmp_path / "hf")])
    main(["import", "--input", str(tmp_path / "hf"), "--output", str(tmp_path / "back")])
    assert capsys.readouterr().out == f"wrote {tmp_path / 'hf'}\nwrote {tmp_path / 'back'}\n"


def test_a_wrong_checkpoint_is_exit_code_2_and_one_line(tmp_path):
    command = [sys.executable, "tools/convert_hf.py", "export", "--checkpoint", tmp_path / "no"]
    done = subprocess.run(
        [*map(str, command), "--output", str(tmp_path / "hf")],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("albert-ds: ") and done.stderr.count("\n") == 1
    assert str(tmp_path / "no") in done.stderr and not (tmp_path / "hf").exists()
