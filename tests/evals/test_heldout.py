"""Held-out metrics are those of every held-out sample, whatever the ranks and micro-batches."""

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import run_ranks
from tests.training import SMALL, join


def evaluate_on(rank: int, data, micro_batch_size: int):
    from dataclasses import replace

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
