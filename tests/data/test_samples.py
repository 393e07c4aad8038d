"""What is drawn of a stored sequence: windows, pairs, masks, and the counts of each."""

import numpy as np
import pytest
import torch

from albert_ds.data.segments import NO_LABEL
from albert_ds.data.shards import open_shards, read_index
from albert_ds.data.stream_config import StreamConfig
from albert_ds.vocab.vocab import CLS, MASK, SEP
from albert_ds.vocab.words import build_word_starts
from tests.data.corpus import SEQUENCE_LENGTH, build, write_wiki
from tests.data.drawing import BATCH, CONFIG, restore, samples_of, stored_sequences, stream, take


def test_layout_of_a_micro_batch(train):
    for batch in take(stream([train], micro=4), 200):
        t = batch.tensors
        bounds = t["cu_seqlens"].tolist()
        assert [t[name].dtype for name in t if name not in ("cu_seqlens", "max_seqlen")] == [
            torch.int64
        ] * 7
        assert t["cu_seqlens"].dtype == torch.int32
        assert len(bounds) == batch.samples + 1 == len(t["pair_labels"]) + 1 == 5
        lengths = np.diff(bounds)
        assert bounds[0] == 0 and bounds[-1] == batch.tokens == len(t["input_ids"])
        assert t["max_seqlen"] == max(lengths) <= SEQUENCE_LENGTH
        assert len(t["seeds"]) == batch.tokens
        assert t["position_ids"].tolist() == [i for n in lengths for i in range(n)]
        assert len(t["masked_positions"]) == len(t["masked_labels"]) == batch.masked
        assert (t["masked_positions"].diff() > 0).all()
        for sample in samples_of([batch]).values():
            ids = restore(sample)
            types = sample[1]
            edges = [i for i, token in enumerate(ids) if token in (CLS, SEP)]
            assert edges[0] == 0 and edges[-1] == len(ids) - 1 and ids[0] == CLS
            paired = len(edges) == 3
            assert types == [0] * (edges[1] + 1) + [1] * (len(ids) - edges[1] - 1)
            assert paired == (sample[5] != NO_LABEL)
            assert not set(sample[3]) & set(edges)
            assert MASK not in ids


def test_every_sample_is_a_window_of_its_sequence(train):
    """Restored and unswapped, a sample is a stretch of the stored sequence at its place."""
    stored = [" ".join(map(str, sequence.ids.tolist())) for sequence in stored_sequences(train)]
    total = len(stored)
    whole = 0
    seen = []
    for sample in samples_of(take(stream([train]), total - total % BATCH)).values():
        ids = restore(sample)
        parts = [ids[1 : ids.index(SEP)], ids[ids.index(SEP) + 1 : -1]]
        if sample[5] == 1:
            parts.reverse()
        text = " ".join(map(str, sum(parts, [])))
        whole += text in stored
        seen += [stored.index(text)] if text in stored else []
    assert whole / total > 0.8  # all but the short draws, a tenth
    assert len(set(seen)) == len(seen)  # none twice in an epoch


@pytest.mark.parametrize("objective", ["sop", "none"])
def test_labels_are_counted(train, objective):
    """A sequence of one sentence has no label, is not paired at random, and is counted."""
    config = StreamConfig(objective=objective, sequence_length=SEQUENCE_LENGTH)
    lone = total = 0
    for batch in take(stream([train], config), 400):
        labels = batch.tensors["pair_labels"]
        assert set(labels.tolist()) <= {0, 1, NO_LABEL}
        assert batch.pairs == (labels != NO_LABEL).sum()
        assert batch.unpaired == (batch.samples - batch.pairs if objective == "sop" else 0)
        lone += batch.samples - batch.pairs
        total += batch.samples
    assert 0 < lone < total / 5 if objective == "sop" else lone == total


def test_nsp_takes_partners_from_other_documents(train):
    config = StreamConfig(objective="nsp", sequence_length=SEQUENCE_LENGTH, short_fraction=0)
    documents = {}
    for sequence in stored_sequences(train):
        ids = sequence.ids.tolist()
        for j in range(len(ids) - 7):
            documents.setdefault(tuple(ids[j : j + 8]), set()).add(sequence.document)
    labels = []
    for sample in samples_of(take(stream([train], config), 400)).values():
        ids = restore(sample)
        first = ids[1 : ids.index(SEP)]
        second = ids[ids.index(SEP) + 1 : -1]
        if sample[5] == NO_LABEL or min(len(first), len(second)) < 8:
            continue
        a, b = documents[tuple(first[:8])], documents[tuple(second[:8])]
        assert bool(a & b) == (sample[5] == 0)
        labels.append(sample[5])
    assert abs(np.mean(labels) - 0.5) < 0.1


def test_nsp_without_another_document_has_no_labels(vocab, tmp_path):
    path = write_wiki(tmp_path / "wiki", [["Ba be bi bo.", "Da de di do."] * 30])
    build(tmp_path / "built", vocab, [path], holdout=0)
    config = StreamConfig(objective="nsp", sequence_length=SEQUENCE_LENGTH, short_fraction=0)
    for batch in take(stream([open_shards(tmp_path / "built", "train")], config), 80):
        assert set(batch.tensors["pair_labels"].tolist()) == {NO_LABEL}
        assert batch.unpaired == batch.samples


def test_tokens_set_aside_are_counted(train):
    def share(config):
        batches = list(take(stream([train], config), 400))
        for batch in batches:
            markers = sum(len(s[0]) for s in samples_of([batch]).values()) - sum(
                i not in (CLS, SEP) for s in samples_of([batch]).values() for i in restore(s)
            )
            assert batch.tokens - markers == batch.available - batch.unused_tokens
        return sum(b.unused_tokens for b in batches) / sum(b.available for b in batches)

    assert share(StreamConfig(sequence_length=SEQUENCE_LENGTH, short_fraction=0)) == 0
    assert 0.02 < share(CONFIG) < 0.09  # a tenth of the sequences, half of each and the full ones
    assert share(StreamConfig(sequence_length=SEQUENCE_LENGTH // 4, short_fraction=0)) > 0.5


def test_shorter_sequences_than_stored(train):
    config = StreamConfig(sequence_length=16, short_fraction=0)
    lengths = [len(s[0]) for s in samples_of(take(stream([train], config), 200)).values()]
    assert max(lengths) == 16 and np.mean(lengths) > 14


def test_masked_share_and_both_budgets(train):
    paper = list(take(stream([train]), 800))
    assert sum(b.masked for b in paper) / sum(b.tokens for b in paper) == pytest.approx(
        0.15, abs=0.01
    )
    released = StreamConfig(sequence_length=SEQUENCE_LENGTH, max_predictions=2)
    assert max(len(s[3]) for s in samples_of(take(stream([train], released), 80)).values()) == 2


def test_words_are_masked_whole(train):
    starts = build_word_starts(train.vocab.pieces, "scripts")
    for sample in samples_of(take(stream([train]), 200)).values():
        ids = restore(sample)
        masked = set(sample[3])
        for i in range(1, len(ids)):
            inside = not starts[ids[i]] and ids[i - 1] not in (CLS, SEP)
            assert not inside or (i in masked) == (i - 1 in masked)


def test_full_packing_fills_samples_to_the_length(vocab, corpus, train, tmp_path):
    """Each reading cuts the overhang of a sequence anew; only a document's rest is shorter."""
    build(tmp_path / "built", vocab, [corpus], packing="full")
    index = read_index(tmp_path / "built")
    assert index["packing"] == "full" and index["counts"]["unused_tokens"] > 0
    source = open_shards(tmp_path / "built", "train")
    config = StreamConfig(sequence_length=SEQUENCE_LENGTH, short_fraction=0)
    full, whole = (
        [len(s[0]) for s in samples_of(take(stream([each], config), 400)).values()]
        for each in (source, train)
    )
    assert max(full) == max(whole) == SEQUENCE_LENGTH
    assert np.mean(np.array(full) == SEQUENCE_LENGTH) > 0.7
    assert np.mean(np.array(whole) == SEQUENCE_LENGTH) < 0.2
    stored = [
        len(sequence.ids)
        for split in ("train", "heldout")
        for sequence in stored_sequences(open_shards(tmp_path / "built", split))
    ]
    assert index["counts"]["unused_tokens"] == sum(max(0, n - SEQUENCE_LENGTH + 3) for n in stored)
    read = sum(min(n, SEQUENCE_LENGTH - 3) for n in stored)
    assert index["fill"] == pytest.approx(read / (len(stored) * (SEQUENCE_LENGTH - 3)))
