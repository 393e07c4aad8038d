"""Hugging Face computes what ours computes, and gives the same weights back."""

import json
import logging
import shutil
import socket
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import reshape
from albert_ds.model.task_heads import AlbertForTask, HeadConfig
from tests.checkpoint.test_model_folder import change_config, change_weights
from tests.finetuning import MODEL, write_checkpoint
from tests.models import run_export, run_import, shake, write_run

CONFIG = replace(MODEL, num_layers=4)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SENTENCES = [
    'The "value" of an object (its state) may change.',
    "Caf\u00e9 prices: \u00a33.50 \u2013 or \u20ac4, in 2,024.",
    "It is [MASK] of the [MASK].",
    "",
]
# Changes to CONFIG -> Hugging Face's groups of layers.
MODELS = [
    ({}, 1),
    ({"sharing": "none"}, 4),
    ({"sharing": "groups:2"}, 2),
    ({"sharing": "pattern:1,1,0,0"}, 2),
    ({"sharing": "attention"}, 4),
    ({"sharing": "ffn"}, 4),
    ({"sharing": "cycle:2"}, 4),
    ({"sharing": "cycle-rev:2"}, 4),
    ({"sharing": "loop:1,1x2,1"}, 4),
    ({"sharing": "pattern:0,0,1,1/0,1,0,1"}, 4),
    ({"embedding_size": 32, "sharing": "none"}, 4),
    ({"embedding_size": 32, "square_map": True}, 1),
    ({"pair_head": False}, 1),
]
OWN = [
    *({"per_layer": name, "num_layers": 11} for name in ("norm", "scale", "position", "lora:3")),
    {"per_layer": "norm,scale,position,lora:3", "embedding_size": 32, "num_layers": 11},
]
HEADS = {
    "glue/rte": HeadConfig(
        kind="classification", num_labels=2, labels=("entailment", "not_entailment")
    ),
    "glue/stsb": HeadConfig(kind="regression", num_labels=1),
    "race": HeadConfig(kind="choice", num_labels=1),
    "tokens": HeadConfig(kind="tokens", num_labels=3, labels=("O", "B-X", "I-X")),
    "squad1": HeadConfig(kind="span", num_labels=2),
    "squad2": HeadConfig(kind="conditional_span", num_labels=1),
}
LOADERS = {
    "glue/rte": "AutoModelForSequenceClassification",
    "glue/stsb": "AutoModelForSequenceClassification",
    "race": "AutoModelForMultipleChoice",
    "tokens": "AutoModelForTokenClassification",
    "squad1": "AutoModelForQuestionAnswering",
}
PAIRS = [("one object", "two"), ("the class", "a list of types"), ("x", "y"), ("value", "state")]


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def encode(sentences: list[list[list[int]]]) -> dict:
    """Our keywords for [CLS] part [SEP] part [SEP] of every sentence, whose parts are ids."""
    ids, segments = [], []
    for parts in sentences:
        ids.append(torch.tensor([2, *(i for part in parts for i in (*part, 3))]))
        lengths = [len(part) + 1 for part in parts]
        lengths[0] += 1
        segments.append(torch.arange(len(parts)).repeat_interleave(torch.tensor(lengths)))
    lengths = [len(each) for each in ids]
    return {
        "input_ids": torch.cat(ids),
        "token_type_ids": torch.cat(segments),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_seqlen": max(lengths),
    }


def encode_masked(vocab, sentence: str) -> list[int]:
    parts = vocab.encode(sentence.split("[MASK]"))
    return [piece for part in parts for piece in (*part, 4)][:-1]


def write_tuned(folder, task: str, vocab, **changes):
    head = HEADS[task]
    config = replace(MODEL, pair_head=head.row.reads_pooled, **changes)
    model = shake(AlbertForTask(config, head, seed=3))
    return write_run(folder, model, vocab, head=head, task=task), model


@torch.no_grad()
def test_a_pretrained_model_computes_the_same_and_comes_back(vocab, tmp_path, offline):
    from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

    for number, (changes, groups) in enumerate(MODELS):
        config = replace(CONFIG, **changes)
        model = shake(AlbertForPretraining(config, seed=3))
        run = write_run(tmp_path / f"run{number}", model, vocab, step=40)
        hf = run_export(run, tmp_path / f"hf{number}")
        assert json.loads((hf / "config.json").read_text())["num_hidden_groups"] == groups, changes
        tokenizer = AutoTokenizer.from_pretrained(hf)
        masked = AutoModelForMaskedLM.from_pretrained(hf).eval()
        pretraining = AutoModelForPreTraining.from_pretrained(hf).eval()
        bare = AutoModel.from_pretrained(hf).eval()
        for sentence in SENTENCES:
            batch = encode([[encode_masked(vocab, sentence)]])
            inputs = tokenizer(sentence, return_tensors="pt")
            assert inputs["input_ids"][0].tolist() == batch["input_ids"].tolist()
            encoded = model.albert(**batch)
            word = model.albert.embeddings.word.weight
            logits = model.mlm_head.logits(encoded["last_hidden_state"], word)
            for hf_logits in (masked(**inputs).logits, pretraining(**inputs).prediction_logits):
                torch.testing.assert_close(hf_logits[0], logits, **CLOSE)
            hf_out = bare(**inputs, output_hidden_states=True)
            for x, y in zip(hf_out.hidden_states, encoded["hidden_states"], strict=True):
                torch.testing.assert_close(x[0], y, **CLOSE)
            if config.pair_head:
                pairs = model.pair_head(encoded["pooled"])
                torch.testing.assert_close(pretraining(**inputs).sop_logits, pairs, **CLOSE)
                torch.testing.assert_close(hf_out.pooler_output, encoded["pooled"], **CLOSE)
        back = run_import(hf, tmp_path / f"back{number}")
        assert (back / "spiece.model").read_bytes() == (run / "spiece.model").read_bytes()
        again = ModelFolder(back).build_model().eval()
        assert replace(again.config, sharing=config.sharing) == config
        states = again.albert(**batch)["hidden_states"]
        assert all(map(torch.equal, states, encoded["hidden_states"])), changes
        if again.config.plan == config.plan:  # not pattern:1,1,0,0, which is groups:2 now
            torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_what_layers_have_of_their_own_is_folded_into_their_blocks(vocab, tmp_path):
    """Exporting compares all logits in float64."""
    for number, changes in enumerate(OWN):
        model = shake(AlbertForPretraining(replace(CONFIG, **changes)))
        run = write_run(tmp_path / f"run{number}", model, vocab)
        hf = run_export(run, tmp_path / f"hf{number}")
        assert json.loads((hf / "config.json").read_text())["num_hidden_groups"] == 11
        card = (hf / "README.md").read_text()
        assert f"`{changes['per_layer']}`" in card and "folded" in card


@torch.no_grad()
def test_a_fine_tuned_model_is_loaded_as_what_it_is(vocab, tmp_path):
    import transformers

    plans = ({}, {"embedding_size": 32, "num_layers": 4, "sharing": "cycle:2"})
    for number, (task, changes) in enumerate((task, plan) for task in LOADERS for plan in plans):
        run, model = write_tuned(tmp_path / f"run{number}", task, vocab, **changes)
        hf = run_export(run, tmp_path / f"hf{number}")
        loader = getattr(transformers, LOADERS[task])
        hf_model, info = loader.from_pretrained(hf, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], (task, info)
        tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
        inputs = tokenizer(*zip(*PAIRS, strict=True), return_tensors="pt", padding=True)
        real = inputs["attention_mask"].bool()
        outputs = model(**encode([vocab.encode(pair) for pair in PAIRS]))
        if task == "race":
            inputs = {name: x.unsqueeze(0) for name, x in inputs.items()}
        out = hf_model.eval()(**inputs)
        if task == "squad1":
            torch.testing.assert_close(out.start_logits[real], outputs["start"], **CLOSE)
            torch.testing.assert_close(out.end_logits[real], outputs["end"], **CLOSE)
        else:
            logits = out.logits[real] if task == "tokens" else out.logits
            torch.testing.assert_close(logits, outputs["logits"], **CLOSE)
        if task == "glue/rte":
            assert hf_model.config.id2label == {0: "entailment", 1: "not_entailment"}
        card = (hf / "README.md").read_text()
        assert f"fine-tuned on {task}" in card and LOADERS[task] in card
        assert f"{sum(p.numel() for p in model.parameters()):,}" in card


def test_the_head_of_squad_2_is_refused_with_its_reason(vocab, tmp_path):
    run, _ = write_tuned(tmp_path / "tuned", "squad2", vocab)
    with pytest.raises(UserError, match="Hugging Face has no such ALBERT") as caught:
        run_export(run, tmp_path / "hf")
    assert str(run) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "hf").exists()


drop_sentence_head = change_weights(lambda x: [x.pop(name) for name in [*x] if "sop" in name])


def test_an_encoder_is_read_from_anything_that_has_one(vocab, tmp_path, caplog):
    from transformers import AutoModel

    run, model = write_tuned(tmp_path / "tuned", "glue/rte", vocab)
    expected = {n: x for n, x in model.state_dict().items() if n.startswith("albert.")}
    hf = run_export(run, tmp_path / "hf")
    for folder in (run, run / "checkpoints" / "best", hf):
        config, state = ModelFolder(folder).read_encoder()
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
        assert config == MODEL
    # Without "albert." in front of the names.
    AutoModel.from_pretrained(hf).save_pretrained(tmp_path / "bare")
    assert "embeddings.LayerNorm.bias" in load_file(tmp_path / "bare" / "model.safetensors")
    change_config(attention_probs_dropout_prob=0.2)(tmp_path / "bare")  # of no use to a task
    bare = ModelFolder(tmp_path / "bare")
    torch.testing.assert_close(bare.read_encoder()[1], expected, rtol=0, atol=0)
    with pytest.raises(UserError, match="fine-tuned .*; it has no pretraining heads"):
        ModelFolder(run).read_pretrained()
    # A released file without a sentence head: its encoder is whole, and nothing need be said.
    pretrained = write_checkpoint(tmp_path / "run", vocab)
    released = run_export(pretrained, tmp_path / "released")
    drop_sentence_head(released)
    with caplog.at_level(logging.WARNING):
        weights = ModelFolder(released).read_encoder()[1]
        torch.testing.assert_close(
            weights, ModelFolder(pretrained).read_encoder()[1], rtol=0, atol=0
        )
        assert "sentence head" not in caplog.text
        config, state = ModelFolder(released).read_pretrained()
    assert config.pair_head and not state["pair_head.weight"].any()
    assert "no sentence head" in caplog.text
    with pytest.raises(UserError, match="attention_probs_dropout_prob 0.2: must be 0.1"):
        bare.read_pretrained()
    change_config(attention_probs_dropout_prob=0.1)(tmp_path / "bare")
    ModelFolder(tmp_path / "bare").read_pretrained()
    assert "no head for masked words" in caplog.text


def test_sharing_is_recognised_in_files_that_repeat_blocks(vocab, tmp_path, caplog):
    """Of ours, and of a program that writes one group a layer."""
    words = ("cycle:2", "attention", "loop:1,1x2,1", "pattern:0,0,1,1/0,1,0,1")
    for number, sharing in enumerate((*words, "pattern:0,0,1,1,0,0")):  # the last in three groups
        model = shake(AlbertForPretraining(reshape(CONFIG, sharing=sharing)))
        run = write_run(tmp_path / f"run{number}", model, vocab)
        hf = run_export(run, tmp_path / f"hf{number}")
        assert ModelFolder(hf).config.sharing == sharing
        assert f"read as --sharing {sharing}" in caplog.text
    model = shake(AlbertForPretraining(replace(CONFIG, sharing="groups:2")))
    hf = run_export(write_run(tmp_path / "run", model, vocab), tmp_path / "hf")
    group = "albert.encoder.albert_layer_groups"

    def write_each_layer(state):
        for layer in (3, 2, 1):
            source = f"{group}.{layer // 2}."
            for name in [name for name in state if name.startswith(source)]:
                state[name.replace(source, f"{group}.{layer}.")] = state[name].clone()

    change_weights(write_each_layer)(hf)
    record = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(record | {"num_hidden_groups": 4}))
    config, weights = ModelFolder(hf).read_pretrained()
    assert config.sharing == "groups:2"
    torch.testing.assert_close(weights, dict(model.state_dict()), rtol=0, atol=0)


def leave_only_spiece(folder) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def write_pickle(folder) -> None:
    """Half precision, with what old versions wrote too."""
    state = {n: x.bfloat16() for n, x in load_file(folder / "model.safetensors").items()}
    state["albert.embeddings.position_ids"] = torch.arange(64)[None]
    state["predictions.decoder.weight"] = state["albert.embeddings.word_embeddings.weight"]
    state["predictions.decoder.bias"] = state["predictions.bias"]
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")


OLD_KEYS = {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0}
V1 = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, **OLD_KEYS}
V2 = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, **OLD_KEYS}
# What a public folder is like -> changes to CONFIG, how transformers saves it, what is done then.
LAYOUTS = {
    "spiece.model": ({}, {}, leave_only_spiece),
    "tokenizer.json alone": ({}, {}, lambda folder: (folder / "spiece.model").unlink()),
    "v1": ({"dropout": 0.1}, {}, change_config(**V1)),
    "v2": ({"dropout": 0}, {}, change_config(**V2)),
    "E = H": ({"embedding_size": 32, "square_map": True}, {}, None),
    "sharded": ({}, {"max_shard_size": "20KB"}, None),
    "bf16": ({}, {"dtype": torch.bfloat16}, None),
    "a pickle in bf16": ({}, {}, write_pickle),
    "no sentence head": ({}, {}, drop_sentence_head),
    "no pooler": ({"pair_head": False}, {"kind": "MaskedLM"}, None),
}


def save_public(hf, public, *, kind="PreTraining", dtype=torch.float32, **options) -> None:
    import transformers

    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(hf, dtype=dtype)
    model.save_pretrained(public, **options)
    transformers.AutoTokenizer.from_pretrained(hf).save_pretrained(public)
    shutil.copy(hf / "spiece.model", public)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_public_folder_goes_in_and_comes_out_again(vocab, tmp_path, layout):
    """save_pretrained -> import -> export -> import: the weights of the file, ids, normalisation,
    and the longest sequence that was trained on."""
    changes, options, change = LAYOUTS[layout]
    model = shake(AlbertForPretraining(replace(CONFIG, **changes), seed=3))
    run = write_run(tmp_path / "run", model, vocab, stream={"sequence_length": 40})
    hf = run_export(run, tmp_path / "hf")
    save_public(hf, tmp_path / "public", **options)
    if change is not None:
        change(tmp_path / "public")
    is_one = (tmp_path / "public" / "model.safetensors").exists()
    assert is_one == (layout not in ("sharded", "a pickle in bf16"))
    first = run_import(tmp_path / "public", tmp_path / "first")
    second = run_import(run_export(first, tmp_path / "again"), tmp_path / "second")
    expected = model.state_dict()
    if "bf16" in layout:
        expected = {name: x.bfloat16().float() for name, x in expected.items()}
    if layout == "no sentence head":
        expected |= {n: torch.zeros_like(x) for n, x in expected.items() if "pair_head" in n}
    texts = ["The object's class (its type).", "CAF\u00c9 \u201cx\u201d, 2,024"]
    for folder in map(ModelFolder, (tmp_path / "public", first, second)):
        assert folder.config == model.config
        torch.testing.assert_close(folder.read_weights(), dict(expected), rtol=0, atol=0)
        assert folder.vocab.encode(texts) == vocab.encode(texts)
        assert folder.vocab.normalisation == vocab.normalisation
        assert folder.trained_length == (64 if layout == "spiece.model" else 40)


def test_texts_are_cut_to_what_was_trained(vocab, tmp_path):
    """The model has 64 positions and has seen 40; --max-length leaves fewer of both."""
    from transformers import AutoModel, AutoTokenizer

    run = write_checkpoint(tmp_path / "run", vocab, stream={"sequence_length": 40})
    text = "the object name class type list string " * 10
    for flags, positions, longest in (([], 64, 40), (["--max-length", 32], 32, 32)):
        hf = run_export(run, tmp_path / f"hf{positions}", *flags)
        tokenizer = AutoTokenizer.from_pretrained(hf)
        model = AutoModel.from_pretrained(hf).eval()
        ids = tokenizer(text, truncation=True, return_tensors="pt")
        assert ids["input_ids"].shape == (1, longest) and tokenizer.model_max_length == longest
        assert model.config.max_position_embeddings == positions
        with torch.no_grad():
            kept = ModelFolder(run).build_model().eval().albert.embeddings.position.weight
            assert torch.equal(model.embeddings.position_embeddings.weight, kept[:positions])
            assert model(**ids).last_hidden_state.isfinite().all()
        card = (hf / "README.md").read_text()
        says = "40 tokens, and 64 positions: **those from 40 on were never trained**"
        assert (says in card) == (positions > longest) and f"| {longest} tokens" in card
    with pytest.raises(UserError, match="--max-length 65: .* has 64 positions; must be at most"):
        run_export(run, tmp_path / "more", "--max-length", 65)
    with pytest.raises(UserError, match="--max-length 2: must be at least 3"):
        run_export(run, tmp_path / "less", "--max-length", 2)
    assert not (tmp_path / "more").exists()
