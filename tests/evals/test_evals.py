"""The trained head, and the features of pairs that it is given."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from albert_ds.evals.frozen import encode_pairs, train_head
from albert_ds.model.albert import AlbertForPretraining
from tests.batches import concatenate, random_samples
from tests.model.conftest import INPUTS
from tests.runs import SMALL


@pytest.fixture
def batches():
    samples = random_samples(12, vocab_size=SMALL.vocab_size, max_length=20, seed=1)
    return [concatenate(samples[:5]), concatenate(samples[5:])]


def test_the_head_learns_what_is_linear_and_nothing_else():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(600, 8)).astype(np.float32)
    rule = (features @ np.arange(1, 9) > 0).astype(np.int64)
    said = train_head(features[:400], rule[:400], features[400:])
    assert (said == rule[400:]).mean() > 0.95
    coin = rng.integers(0, 2, 600)
    said = train_head(features[:400], coin[:400], features[400:])
    assert 0.35 < (said == coin[400:]).mean() < 0.65


@pytest.mark.parametrize("has_pooler", [True, False])
def test_only_labelled_pairs_are_encoded(batches, has_pooler):
    """As [CLS] of all tokens' last state, which is computed for [CLS] alone."""
    model = AlbertForPretraining(replace(SMALL, pair_head=has_pooler), seed=2).eval()
    features, labels = encode_pairs(model, batches, torch.device("cpu"))
    every = torch.cat([b.tensors["pair_labels"] for b in batches])
    assert labels.tolist() == every[every >= 0].tolist()
    expected = []
    for batch in batches:
        with torch.no_grad():
            outputs = model.albert(**{n: batch.tensors[n] for n in INPUTS})
        states = outputs["last_hidden_state"][batch.tensors["cu_seqlens"][:-1].long()]
        expected.append(outputs["pooled"] if has_pooler else states)
    torch.testing.assert_close(torch.tensor(features), torch.cat(expected)[every >= 0])
