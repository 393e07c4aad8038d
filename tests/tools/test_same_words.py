"""tools/lab/same_words.py: the words are scored as Hugging Face scores them."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from albert_ds.checkpoint.model_folder import ModelFolder
from tests.command import ROOT, run_python
from tools.lab.same_words import MASKED, fill, read_texts

MODEL = ROOT / "tools" / "demo" / "model"
SCRIPT = ROOT / "tools" / "lab" / "same_words.py"


def test_nats_are_those_of_hugging_face(data):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForMaskedLM.from_pretrained(MODEL).eval()
    drawn, expected = [], []
    for words in read_texts(data)[:3]:
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
    done = run_python(SCRIPT, *flags[:-1], "1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "must have two held-out texts" in done.stderr
