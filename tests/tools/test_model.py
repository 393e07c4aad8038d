"""The small trained model of the repository: what it has learnt, and that Hugging Face agrees."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.evals.fill_mask import fill_masks
from albert_ds.evals.minimal_pairs import Pair, score_pairs, score_sentences
from tests.conftest import ROOT

MODEL = ROOT / "tools" / "demo" / "model"
CPU = torch.device("cpu")
PAIRS = [
    ("These books are old.", "These books is old."),
    ("This house was built in 1900.", "These house was built in 1900."),
    ("He had seen those men.", "He had seen those man."),
    ("The children have gone home.", "The children has gone home."),
    ("She hurt herself.", "She hurt himself."),
    ("The king lost his sword.", "The king lost her sword."),
    ("He has written a letter.", "He has wrote a letter."),
    ("They were born in this city.", "They was born in this city."),
    ("The album was released in 2005.", "The album were released in 2005."),
    ("Many people live in that town.", "Many people lives in that town."),
    ("He went to the station.", "He gone to the station."),
    ("Her brother is a lawyer.", "Her brother are a lawyer."),
]
SENTENCES = [
    "The band released their first [MASK] in 1998.",
    "She opened the [MASK] and went into the room.",
    "He was born in [MASK] and died in [MASK].",
]


def test_it_tells_a_sentence_from_its_ungrammatical_neighbour():
    model = ModelFolder(MODEL).build_model()
    vocab = ModelFolder(MODEL).vocab
    pairs = [Pair("agreement", "agreement", good, bad) for good, bad in PAIRS]
    assert sum(score_pairs(model, vocab, pairs, CPU)) >= len(PAIRS) - 1


@pytest.mark.parametrize("within_word", [False, True])
def test_hugging_face_scores_sentences_alike(within_word):
    """Token by token; word_ids are those of Hugging Face's tokenizer."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    hf_model = transformers.AutoModelForMaskedLM.from_pretrained(MODEL).eval()
    sentences = ["Aubrey's unhappiest grandchildren misremembered everything.", "It rained.", "I"]
    expected = []
    masked = 0
    for sentence in sentences:
        encoded = tokenizer(sentence, return_tensors="pt")
        ids = encoded["input_ids"][0]
        words = encoded.word_ids()
        total = 0.0
        for at in range(1, len(ids) - 1):
            copy = ids.clone()
            for other in range(at, len(ids) - 1):
                if other == at or within_word and words[other] == words[at]:
                    copy[other] = tokenizer.mask_token_id
                    masked += 1
            with torch.inference_mode():
                logits = hf_model(copy[None], token_type_ids=torch.zeros_like(copy[None])).logits[
                    0, at
                ]
            total += logits.log_softmax(-1)[ids[at]].item()
        expected.append(total)
    model = ModelFolder(MODEL).build_model()
    vocab = ModelFolder(MODEL).vocab
    scores = score_sentences(model, vocab, sentences, CPU, within_word=within_word)
    assert scores == pytest.approx(expected, abs=1e-3) and all(map(math.isfinite, scores))
    tokens = sum(len(ids) for ids in vocab.encode(sentences))
    assert (masked > tokens) == within_word and masked >= tokens


def test_it_fills_masks_as_the_documentation_says():
    best = [masks[0][0][0] for masks in fill_masks(ModelFolder(MODEL), SENTENCES[:2], top=1)]
    assert best == ["\u2581album", "\u2581door"]


def test_hugging_face_fills_masks_alike():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    hf_model = transformers.AutoModelForMaskedLM.from_pretrained(MODEL).eval()
    for sentence, filled in zip(
        SENTENCES, fill_masks(ModelFolder(MODEL), SENTENCES, top=5), strict=True
    ):
        encoded = tokenizer(sentence, return_tensors="pt")
        with torch.inference_mode():
            logits = hf_model(**encoded).logits[0]
        masks = logits[encoded["input_ids"][0] == tokenizer.mask_token_id].softmax(-1)
        assert len(masks) == len(filled)
        for row, best in zip(masks, filled, strict=True):
            pieces = tokenizer.convert_ids_to_tokens(row.topk(5).indices.tolist())
            assert pieces == [piece for piece, _ in best]
            expected = torch.tensor([share for _, share in best])
            torch.testing.assert_close(row.topk(5).values, expected, rtol=1e-4, atol=1e-6)


ALONE = """
import sys
sys.modules["albert_ds"] = None  # an import of it is an error
from transformers import pipeline
for filled in pipeline("fill-mask", sys.argv[1])(sys.argv[2:]):
    print(filled[0]["token_str"])
"""


def test_transformers_alone_load_it(tmp_path):
    """A copy, in a process that sees neither this checkout nor its path."""
    pytest.importorskip("transformers")
    copy = shutil.copytree(MODEL, tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, copy, *SENTENCES[:2]],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["album", "door"]
