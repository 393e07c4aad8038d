"""The stream: one integer is the position, and nothing else changes a sample."""

import itertools
import pickle
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch

from albert_ds.data.samples import StreamConfig
from albert_ds.data.segments import NO_LABEL
from albert_ds.data.shards import Shard, open_shards
from albert_ds.data.stream import MicroBatchReader, heldout_batches, training_batches
from albert_ds.data.vocab import CLS, MASK, SEP, Normalisation, train_vocab
from albert_ds.data.words import build_word_starts
from albert_ds.errors import DamagedData, UserError
from tests.data.corpus import SEQUENCE_LENGTH, build, make_documents, write_wiki

CONFIG = StreamConfig(sequence_length=SEQUENCE_LENGTH, seed=3)
BATCH = 8


@pytest.fixture(scope="module")
def train(built):
    return open_shards(built, "train")


@pytest.fixture(scope="module")
def other(vocab, tmp_path_factory):
    """A second source, of the same vocabulary."""
    folder = tmp_path_factory.mktemp("other")
    path = write_wiki(folder / "wiki", make_documents(25, seed=9))
    build(folder / "built", vocab, [path])
    return open_shards(folder / "built", "train")


def stream(sources, config=CONFIG, *, weights=None, start=0, rank=0, ranks=1, workers=0, micro=2):
    return training_batches(
        sources,
        weights,
        config,
        start=start,
        batch_size=BATCH,
        micro_batch_size=micro,
        dp_rank=rank,
        dp_size=ranks,
        num_workers=workers,
    )


def samples_of(batches):
    """{position: everything that was drawn for it}, from micro-batches of any kind."""
    found = {}
    for batch in batches:
        t, bounds = batch.tensors, batch.tensors["cu_seqlens"].tolist()
        for i, position in enumerate(batch.sample_ids):
            begin, end = bounds[i : i + 2]
            masked = (t["masked_positions"] >= begin) & (t["masked_positions"] < end)
            assert position not in found
            found[position] = (
                t["input_ids"][begin:end].tolist(),
                t["token_type_ids"][begin:end].tolist(),
                t["position_ids"][begin:end].tolist(),
                (t["masked_positions"][masked] - begin).tolist(),
                t["masked_labels"][masked].tolist(),
                t["pair_labels"][i].item(),
            )
    return found


def take(batches, samples):
    """The micro-batches that hold the next `samples` samples."""
    while samples > 0:
        batch = next(batches)
        samples -= batch.samples
        yield batch


def restore(sample):
    """The ids of a sample before masking."""
    ids = list(sample[0])
    for position, label in zip(sample[3], sample[4], strict=True):
        ids[position] = label
    return ids


def test_layout_of_a_micro_batch(train):
    for batch in take(stream([train], micro=4), 200):
        t = batch.tensors
        bounds = t["cu_seqlens"].tolist()
        assert [t[name].dtype for name in t if name not in ("cu_seqlens", "max_seqlen")] == [
            torch.int64
        ] * 6
        assert t["cu_seqlens"].dtype == torch.int32
        assert len(bounds) == batch.samples + 1 == len(t["pair_labels"]) + 1 == 5
        lengths = np.diff(bounds)
        assert bounds[0] == 0 and bounds[-1] == batch.tokens == len(t["input_ids"])
        assert t["max_seqlen"] == max(lengths) <= SEQUENCE_LENGTH
        assert t["position_ids"].tolist() == [i for n in lengths for i in range(n)]
        assert len(t["masked_positions"]) == len(t["masked_labels"]) == batch.masked
        assert (t["masked_positions"].diff() > 0).all()
        for sample in samples_of([batch]).values():
            ids, types = restore(sample), sample[1]
            edges = [i for i, token in enumerate(ids) if token in (CLS, SEP)]
            assert edges[0] == 0 and edges[-1] == len(ids) - 1 and ids[0] == CLS
            paired = len(edges) == 3
            assert types == [0] * (edges[1] + 1) + [1] * (len(ids) - edges[1] - 1)
            assert paired == (sample[5] != NO_LABEL)
            assert not set(sample[3]) & set(edges)
            assert MASK not in ids


def test_every_sample_is_a_window_of_its_sequence(train):
    """Restored and unswapped, a sample is a stretch of the stored sequence at its place."""
    stored = [
        " ".join(map(str, shard[i].ids.tolist()))
        for shard in (Shard(train, n) for n in range(len(train.shards)))
        for i in range(len(shard))
    ]
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


def test_stream_from_k_is_the_stream_without_its_first_k(train):
    whole = samples_of(take(stream([train]), 160))
    for start in (8, 64, 152):
        rest = samples_of(take(stream([train], start=start), 160 - start))
        assert rest == {position: whole[position] for position in range(start, 160)}


@pytest.mark.parametrize("objective", ["sop", "nsp"])
@pytest.mark.parametrize("ranks, workers, micro", [(1, 2, 4), (2, 0, 1), (2, 2, 2), (4, 0, 2)])
def test_ranks_workers_and_micro_batches_change_nothing(train, objective, ranks, workers, micro):
    config = StreamConfig(objective=objective, sequence_length=SEQUENCE_LENGTH, seed=3)
    steps = 12
    expected = samples_of(take(stream([train], config, micro=8), steps * BATCH))
    found = {}
    for rank in range(ranks):
        batches = stream([train], config, rank=rank, ranks=ranks, workers=workers, micro=micro)
        mine = list(take(batches, steps * BATCH // ranks))
        for step in range(steps):  # every step gives every rank its share, in order
            per_step = BATCH // ranks // micro
            ids = sum((b.sample_ids for b in mine[step * per_step : (step + 1) * per_step]), [])
            assert ids == list(range(step * BATCH + rank, (step + 1) * BATCH, ranks))
        found |= samples_of(mine)
    assert found == expected


def test_a_reader_can_be_sent_to_another_process(train):
    """Where workers are not forked they are given a copy of it."""
    reader = MicroBatchReader([train], None, CONFIG)
    again = pickle.loads(pickle.dumps(reader))
    assert samples_of([again.read(range(8))]) == samples_of([reader.read(range(8))])


def test_epochs_hold_every_sequence_and_draw_anew(train):
    total = int(train.sizes.sum())
    config = StreamConfig(sequence_length=SEQUENCE_LENGTH, short_fraction=0, objective="none")
    drawn = samples_of(take(stream([train], config), 2 * total + BATCH))
    epochs = [[drawn[p] for p in range(e * total, (e + 1) * total)] for e in (0, 1)]

    def stored(samples):
        return sorted(tuple(i for i in restore(s) if i not in (CLS, SEP)) for s in samples)

    assert stored(epochs[0]) == stored(epochs[1])
    assert sorted(s[0] for s in epochs[0]) != sorted(s[0] for s in epochs[1])
    again = samples_of(take(stream([train], StreamConfig(sequence_length=64, seed=4)), total))
    assert [s[0] for s in again.values()] != [s[0] for s in epochs[0]]


def test_sop_has_no_partner_from_elsewhere_and_counts_the_unpaired(train):
    """A sequence of one sentence has no label, is not paired at random, and is counted."""
    lone = total = 0
    for batch in take(stream([train]), 400):
        labels = batch.tensors["pair_labels"]
        assert set(labels.tolist()) <= {0, 1, NO_LABEL}
        assert batch.pairs == (labels != NO_LABEL).sum()
        assert batch.unpaired == (labels == NO_LABEL).sum() == batch.samples - batch.pairs
        lone += batch.unpaired
        total += batch.samples
    assert 0 < lone < total / 5


def test_nsp_takes_partners_from_other_documents(train):
    config = StreamConfig(objective="nsp", sequence_length=SEQUENCE_LENGTH, short_fraction=0)
    documents = {}
    for number in range(len(train.shards)):
        shard = Shard(train, number)
        for i in range(len(shard)):
            ids = shard[i].ids.tolist()
            for j in range(len(ids) - 7):
                documents.setdefault(tuple(ids[j : j + 8]), set()).add(shard[i].document)
    labels = []
    for sample in samples_of(take(stream([train], config), 400)).values():
        ids = restore(sample)
        first, second = ids[1 : ids.index(SEP)], ids[ids.index(SEP) + 1 : -1]
        if sample[5] == NO_LABEL or min(len(first), len(second)) < 8:
            continue
        a, b = documents[tuple(first[:8])], documents[tuple(second[:8])]
        assert bool(a & b) == (sample[5] == 0)
        labels.append(sample[5])
    assert abs(np.mean(labels) - 0.5) < 0.1


def test_nsp_without_another_document_has_no_negatives(vocab, tmp_path):
    path = write_wiki(tmp_path / "wiki", [["Ba be bi bo.", "Da de di do."] * 30])
    build(tmp_path / "built", vocab, [path], holdout=0)
    config = StreamConfig(objective="nsp", sequence_length=SEQUENCE_LENGTH, short_fraction=0)
    batches = list(take(stream([open_shards(tmp_path / "built", "train")], config), 80))
    assert {label for b in batches for label in b.tensors["pair_labels"].tolist()} == {0, NO_LABEL}
    assert sum(batch.unpaired for batch in batches) > 20


def test_objective_none_has_no_labels_and_misses_none(train):
    config = StreamConfig(objective="none", sequence_length=SEQUENCE_LENGTH)
    for batch in take(stream([train], config), 40):
        assert batch.tensors["pair_labels"].unique().tolist() == [NO_LABEL]
        assert batch.pairs == batch.unpaired == 0


def test_tokens_set_aside_are_counted(train):
    def share(config):
        batches = list(take(stream([train], config), 400))
        for batch in batches:
            markers = sum(len(s[0]) for s in samples_of([batch]).values()) - sum(
                i not in (CLS, SEP) for s in samples_of([batch]).values() for i in restore(s)
            )
            assert batch.tokens - markers == batch.available - batch.set_aside
        return sum(b.set_aside for b in batches) / sum(b.available for b in batches)

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
    starts = build_word_starts(train.vocab.pieces, "unicode")
    for sample in samples_of(take(stream([train]), 200)).values():
        ids, masked = restore(sample), set(sample[3])
        for i in range(1, len(ids)):
            inside = not starts[ids[i]] and ids[i - 1] not in (CLS, SEP)
            assert not inside or (i in masked) == (i - 1 in masked)


def test_mixture_has_exact_shares_and_one_position(train, other):
    weights = [1.0, 3.0]
    batches = list(take(stream([train, other], weights=weights), 480))
    drawn = samples_of(batches)
    own = {tuple(s) for s in stored_sequences(train)}
    config = StreamConfig(
        sequence_length=SEQUENCE_LENGTH, seed=3, short_fraction=0, objective="none"
    )
    plain = samples_of(take(stream([train, other], config, weights=weights), 480))
    count = sum(tuple(i for i in restore(s) if i not in (CLS, SEP)) in own for s in plain.values())
    assert 90 < count < 150  # exact over a block of 10,000, tested with the order
    rest = samples_of(take(stream([train, other], weights=weights, start=200), 280))
    assert rest == {position: drawn[position] for position in range(200, 480)}


def test_sources_share_a_vocabulary(train, documents, tmp_path):
    text = [sentence for document in documents for sentence in document]
    vocab = train_vocab(text, Normalisation(), vocab_size=100)
    build(tmp_path / "built", vocab, [write_wiki(tmp_path / "wiki", documents[:9])])
    with pytest.raises(UserError, match="--data .*built: its vocabulary is not that of"):
        stream([train, open_shards(tmp_path / "built", "train")])


def stored_sequences(source):
    for number in range(len(source.shards)):
        shard = Shard(source, number)
        yield from (shard[i].ids.tolist() for i in range(len(shard)))


def test_held_out_batches_are_fixed_and_alike_on_every_rank(built):
    source = open_shards(built, "heldout")
    total = int(source.sizes.sum())
    for limit, ranks, micro in [(7, 1, 2), (7, 4, 1), (10**6, 3, 2), (1, 4, 1)]:
        runs = [
            [
                list(
                    heldout_batches(
                        source,
                        CONFIG,
                        limit=limit,
                        micro_batch_size=micro,
                        dp_rank=rank,
                        dp_size=ranks,
                    )
                )
                for rank in range(ranks)
            ]
            for _ in range(2)
        ]
        assert len({len(batches) for batches in runs[0]}) == 1
        everything = [samples_of(itertools.chain(*run)) for run in runs]
        assert everything[0] == everything[1]
        assert sorted(everything[0]) == list(range(min(limit, total)))
        for batch in itertools.chain(*runs[0]):
            if not batch.samples:
                assert batch.tensors["input_ids"].tolist() == [CLS, SEP]
                assert batch.tensors["cu_seqlens"].tolist() == [0, 2]
                assert batch.tensors["pair_labels"].tolist() == [NO_LABEL]
                assert len(batch.tensors["masked_positions"]) == 0
                counts = {f.name: getattr(batch, f.name) for f in fields(batch)}
                del counts["tensors"]
                assert not any(counts.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_is_named_in_the_stream(built, tmp_path, workers):
    folder = shutil.copytree(built, tmp_path / "data")
    path = folder / "train-000001.tar"
    content = bytearray(path.read_bytes())
    content[content.index(b"train-000001-00004.seq") + 512 + 18] ^= 1
    path.write_bytes(content)
    batches = stream([open_shards(folder, "train")], workers=workers)
    with pytest.raises(DamagedData) as error:
        list(take(batches, 1000))
    assert str(error.value) == f"{path}: record train-000001-00004.seq: its checksum is wrong"


def test_bad_numbers(train, other):
    with pytest.raises(UserError, match="start 3: must be a multiple of the batch size 8"):
        stream([train], start=3)
    with pytest.raises(UserError, match="--batch-size 8: must be a multiple .* 3 times 1"):
        stream([train], micro=3)
    with pytest.raises(UserError, match="--data-weights: 1 weights for 2 of --data"):
        stream([train, other], weights=[1.0])
    with pytest.raises(UserError, match="--sequence-length 512: .* at most 64 tokens"):
        stream([train], StreamConfig())
    for field in ("objective", "word_boundaries"):
        with pytest.raises(UserError, match="must be one of"):
            StreamConfig(**{field: "other"})
    for setting in ({"short_fraction": 2}, {"max_ngram": 0}, {"max_predictions": 0}, {"seed": -1}):
        with pytest.raises(UserError, match="--" + next(iter(setting)).replace("_", "-")):
            StreamConfig(**setting)
