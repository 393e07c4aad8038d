"""Fine-tuned models out to Hugging Face, and encoders in from anything that has one."""

import json
import logging
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from albert_ds.data.vocab import Normalisation, train_vocab
from albert_ds.errors import UserError
from albert_ds.interop.export import export_hf
from albert_ds.interop.weights import read_encoder, read_weights
from albert_ds.model.config import HeadConfig
from albert_ds.model.task_heads import AlbertForTask
from tests.finetuning import MODEL, write_checkpoint

HEADS = {
    "glue/rte": HeadConfig(
        kind="classification", num_labels=2, labels=("entailment", "not_entailment")
    ),
    "glue/stsb": HeadConfig(kind="regression", num_labels=1),
    "race": HeadConfig(kind="choice", num_labels=1),
    "squad1": HeadConfig(kind="span", num_labels=2),
    "squad2": HeadConfig(kind="conditional_span", num_labels=1),
}
PAIRS = [("one object", "two"), ("the class", "a list of types"), ("x", "y"), ("value", "state")]


@pytest.fixture(scope="module")
def vocab(text_file):
    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    return train_vocab(lines, Normalisation(), vocab_size=300)


@pytest.fixture
def make_tuned(tmp_path, vocab):
    """A function task -> (a folder as fine-tuning leaves it, its model)."""

    def make(task, **changes):
        head, run = HEADS[task], tmp_path / "tuned"
        config = replace(MODEL, pair_head=head.reads_pooled, **changes)
        model = AlbertForTask(config, head, seed=3).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        (run / "checkpoints" / "best").mkdir(parents=True)
        save_file(model.state_dict(), run / "checkpoints" / "best" / "weights.safetensors")
        content = {"task": task, "model": asdict(config), "head": asdict(head)}
        (run / "config.json").write_text(json.dumps(content))
        vocab.write(run)
        return run, model

    return make


def encode(vocab, pairs):
    """Our keywords for [CLS] a [SEP] b [SEP] of every pair."""
    sequences, segments = [], []
    for a, b in pairs:
        first, second = vocab.encode([a, b])
        sequences.append(torch.tensor([2, *first, 3, *second, 3]))
        segments.append(torch.tensor([0] * (len(first) + 2) + [1] * (len(second) + 1)))
    lengths = [len(ids) for ids in sequences]
    return {
        "input_ids": torch.cat(sequences),
        "token_type_ids": torch.cat(segments),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_seqlen": max(lengths),
    }


LOADERS = {
    "glue/rte": "AutoModelForSequenceClassification",
    "glue/stsb": "AutoModelForSequenceClassification",
    "race": "AutoModelForMultipleChoice",
    "squad1": "AutoModelForQuestionAnswering",
}


@pytest.mark.parametrize("task", LOADERS)
@pytest.mark.parametrize("changes", [{}, {"embedding_size": 32, "sharing": "ffn"}], ids=str)
def test_hugging_face_loads_it_as_what_it_is(make_tuned, vocab, tmp_path, task, changes):
    import transformers

    run, model = make_tuned(task, **changes)
    hf = tmp_path / "hf"
    export_hf(run, hf)
    theirs, info = getattr(transformers, LOADERS[task]).from_pretrained(
        hf, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    inputs = tokenizer(*zip(*PAIRS, strict=True), return_tensors="pt", padding=True)
    with torch.no_grad():
        ours = model(**encode(vocab, PAIRS))
        if task == "race":
            out = theirs.eval()(**{name: x.unsqueeze(0) for name, x in inputs.items()})
        else:
            out = theirs.eval()(**inputs)
    close = {"rtol": 1e-5, "atol": 1e-5}
    if task == "squad1":
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(out.start_logits[real], ours["start"], **close)
        torch.testing.assert_close(out.end_logits[real], ours["end"], **close)
    else:
        torch.testing.assert_close(out.logits, ours["logits"], **close)
    if task == "glue/rte":
        assert theirs.config.id2label == {0: "entailment", 1: "not_entailment"}
    card = (hf / "README.md").read_text()
    assert f"fine-tuned on {task}" in card and LOADERS[task] in card
    assert f"{sum(p.numel() for p in model.parameters()):,}" in card


def test_the_head_of_squad_2_is_refused_with_its_reason(make_tuned, tmp_path):
    run, _ = make_tuned("squad2")
    with pytest.raises(UserError, match="Hugging Face has no such ALBERT") as caught:
        export_hf(run, tmp_path / "hf")
    assert str(run) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_an_encoder_is_read_from_anything_that_has_one(make_tuned, vocab, tmp_path):
    run, model = make_tuned("glue/rte")
    hf = tmp_path / "hf"
    export_hf(run, hf)
    expected = {n: x for n, x in model.state_dict().items() if n.startswith("albert.")}
    pretrained = write_checkpoint(tmp_path / "run", vocab)
    for folder, wanted in (
        (run, expected),
        (run / "checkpoints" / "best", expected),
        (hf, expected),
        (pretrained, None),
    ):
        config, state = read_encoder(folder)
        if wanted is None:
            _, everything = read_weights(folder)
            wanted = {n: x for n, x in everything.items() if n.startswith("albert.")}
        torch.testing.assert_close(state, wanted, rtol=0, atol=0)
        assert config == MODEL


def test_a_released_file_without_a_sentence_head_is_an_encoder_too(vocab, tmp_path, caplog):
    run = write_checkpoint(tmp_path / "run", vocab)
    hf = tmp_path / "hf"
    export_hf(run, hf)
    state = load_file(hf / "model.safetensors")
    save_file({n: x for n, x in state.items() if "sop" not in n}, hf / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        _, found = read_encoder(hf)
    torch.testing.assert_close(found, read_encoder(run)[1], rtol=0, atol=0)
    assert "sentence head" not in caplog.text


def test_a_fine_tuned_model_is_not_pretrained(make_tuned):
    run, _ = make_tuned("glue/rte")
    with pytest.raises(UserError, match="fine-tuned .*; it has no pretraining heads"):
        read_weights(run)


def test_a_folder_of_seeds_names_them(tmp_path):
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}").mkdir()
    with pytest.raises(UserError, match="name one of seed-0, seed-1 in it"):
        read_encoder(tmp_path)
