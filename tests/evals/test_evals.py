"""Figure 1's measures against numpy, the trained head, and held-out metrics in every layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from albert_ds.evals.frozen import encode_pairs, measure_similarity, train_head
from albert_ds.model.albert import AlbertForPretraining
from tests.batches import concatenate, random_samples
from tests.distributed import run_ranks
from tests.training import SMALL, join

INPUTS = ("input_ids", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen")


@pytest.fixture
def batches():
    samples = random_samples(12, vocab_size=SMALL.vocab_size, max_length=20, seed=1)
    return [concatenate(samples[:5]), concatenate(samples[5:])]


def test_distances_and_angles_are_those_of_numpy(batches):
    model = AlbertForPretraining(SMALL, seed=2).eval()
    found = measure_similarity(model, batches, torch.device("cpu"))
    with torch.no_grad():
        states = [
            [
                x.double().numpy()
                for x in model.albert(**{n: b.tensors[n] for n in INPUTS})["hidden_states"]
            ]
            for b in batches
        ]
    layers = [np.concatenate(parts) for parts in zip(*states, strict=True)]
    assert found["tokens"] == len(layers[0]) == sum(b.tokens for b in batches)
    for layer, (a, b) in enumerate(zip(layers, layers[1:], strict=False)):
        assert found["l2"][layer] == pytest.approx(np.sqrt(((a - b) ** 2).sum(1)).mean())
        cosine = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
        assert found["degrees"][layer] == pytest.approx(np.degrees(np.arccos(cosine)).mean())


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
            found = model.albert(**{n: batch.tensors[n] for n in INPUTS})
        states = found["last_hidden_state"][batch.tensors["cu_seqlens"][:-1].long()]
        expected.append(found["pooled"] if has_pooler else states)
    torch.testing.assert_close(torch.tensor(features), torch.cat(expected)[every >= 0])


def evaluate_on(rank: int, data, micro_batch_size: int):
    from albert_ds.data.samples import StreamConfig
    from albert_ds.data.shards import open_shards
    from albert_ds.data.stream import heldout_batches
    from albert_ds.evals import heldout
    from albert_ds.model.albert import AlbertForPretraining

    device, mesh, _ = join(1)
    source = open_shards(data, "heldout")
    stream = StreamConfig(sequence_length=64)
    shape = replace(SMALL, vocab_size=source.vocab.size, max_position_embeddings=64)
    model = AlbertForPretraining(shape, seed=1)
    batches = heldout.read_batches(
        data, stream, limit=7, micro_batch_size=micro_batch_size, mesh=mesh
    )
    values = heldout.evaluate(model, batches, mesh, device, stream.objective)
    # The same, one sample at a time and with cross entropies written out.
    losses, right, masked = 0.0, 0, 0
    model.eval()
    batches = heldout_batches(source, stream, limit=7, micro_batch_size=1, dp_rank=0, dp_size=1)
    for batch in batches:
        t = batch.tensors
        with torch.no_grad():
            states = model.albert(
                *(t[name] for name in ("input_ids", "token_type_ids", "position_ids")),
                t["cu_seqlens"],
                t["max_seqlen"],
            )["last_hidden_state"]
            word = model.albert.embeddings.word.weight
            logits = model.mlm_head.logits(states[t["masked_positions"]], word)
        losses += float(F.cross_entropy(logits, t["masked_labels"], reduction="sum"))
        right += int((logits.argmax(-1) == t["masked_labels"]).sum())
        masked += len(t["masked_labels"])
    return values, losses / masked, right / masked, masked


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 3), (2, 2)])
def test_every_sample_counts_once(data, world_size, micro_batch_size):
    for values, loss, accuracy, masked in run_ranks(
        evaluate_on, world_size, data, micro_batch_size
    ):
        assert values["heldout_mlm_loss"] == pytest.approx(loss, rel=1e-5)
        assert values["heldout_mlm_accuracy"] == pytest.approx(accuracy)
        assert values["heldout_masked"] == masked
