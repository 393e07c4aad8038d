"""tools/lab/same_words.py: the words are scored as Hugging Face scores them."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.data.shards import open_shards
from albert_ds.vocab.vocab import Normalisation, read_vocab, train_vocab
from tests.command import ROOT, run_python
from tests.finetuning import write_checkpoint
from tools.lab.same_words import FEWEST, MASKED, fill, read_texts

MODEL = ROOT / "tools" / "demo" / "model"
SCRIPT = ROOT / "tools" / "lab" / "same_words.py"


def test_nats_are_those_of_hugging_face(data):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForMaskedLM.from_pretrained(MODEL).eval()
    drawn, expected = [], []
    texts = read_texts(open_shards(data, "heldout"))
    for words in [text for text in texts if len(text) >= FEWEST][:3]:
        ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
        chosen = [n for n, word in enumerate(words) if word.isalpha() and len(ids[n]) == 1][:MASKED]
        assert len(chosen) == MASKED
        drawn.append((words, chosen))
        shown = [tokenizer.mask_token if n in chosen else word for n, word in enumerate(words)]
        inputs = tokenizer(" ".join(shown), return_tensors="pt")
        masks = inputs["input_ids"][0] == tokenizer.mask_token_id
        with torch.inference_mode():
            scores = model(**inputs).logits[0, masks].log_softmax(-1)
        expected.append([-scores[at, ids[n][0]].item() for at, n in enumerate(chosen)])
    assert fill(ModelFolder(MODEL), drawn) == [pytest.approx(nats, abs=1e-3) for nats in expected]


def test_a_model_differs_from_itself_by_nothing(data):
    flags = ("--checkpoints", MODEL, MODEL, "--data", data, "--texts", "2")
    done = run_python(SCRIPT, *flags)
    assert done.returncode == 0, done.stderr
    assert "| 12,000 |" in done.stdout and "| +0.000 +- 0.000 |" in done.stdout
    assert f"{2 * MASKED} words of 2 texts" in done.stdout
    assert "1 were not drawn" in done.stdout
    done = run_python(SCRIPT, *flags[:-1], "1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "must have two texts to compare" in done.stderr


def test_models_of_two_vocabularies_fill_the_same_words(data, vocab, tmp_path):
    """An untrained model of 800 pieces gives every word about ln 800 nats."""
    pieces = read_vocab(data / "spiece.model")
    untrained = write_checkpoint(tmp_path / "untrained", pieces, vocab_size=pieces.size)
    done = run_python(SCRIPT, "--checkpoints", untrained, MODEL, "--data", data)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| /")]
    assert [row[1] for row in rows] == ["800", "12,000"]
    assert float(rows[0][2]) == pytest.approx(math.log(800), abs=0.2)
    assert float(rows[1][2]) < float(rows[0][2])
    short = write_checkpoint(tmp_path / "short", vocab, max_position_embeddings=16)
    done = run_python(SCRIPT, "--checkpoints", short, MODEL, "--data", data)
    assert done.returncode == 2 and "are longer than what a model was trained on" in done.stderr


def test_a_vocabulary_of_another_normalisation_is_refused(data, text_file, tmp_path):
    lines = text_file.read_text(encoding="utf-8").splitlines()[:3000]
    cased = train_vocab(lines, Normalisation(lower_case=False), vocab_size=300)
    run = write_checkpoint(tmp_path / "cased", cased)
    done = run_python(SCRIPT, "--checkpoints", MODEL, run, "--data", data)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"--checkpoints {run}: normalises text as nfkc-cased" in done.stderr


def test_text_without_spaces_is_refused(data, tmp_path):
    segmented = shutil.copytree(data, tmp_path / "segmented")
    index = json.loads((data / "index.json").read_text())
    (segmented / "index.json").write_text(json.dumps({**index, "segmented": True}))
    done = run_python(SCRIPT, "--checkpoints", MODEL, MODEL, "--data", segmented)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"--data {segmented}: its language has no words between spaces" in done.stderr
