"""The stream: one integer is the position, and nothing else changes a sample."""

import gc
import itertools
import multiprocessing
import os
import resource
import shutil
from dataclasses import fields
from types import SimpleNamespace

import pytest

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.data.segments import NO_LABEL
from albert_ds.data.shards import open_shards
from albert_ds.data.stream import BYTES_A_TOKEN, MicroBatchReader, heldout_batches, training_batches
from albert_ds.data.stream_config import DataPlan, StreamConfig
from albert_ds.settings.pretrain import read_config
from albert_ds.vocab.vocab import CLS, SEP, Normalisation, train_vocab
from tests.conftest import train_command
from tests.data.corpus import SEQUENCE_LENGTH, build, make_documents, write_wiki
from tests.data.drawing import BATCH, CONFIG, restore, samples_of, stored_sequences, stream, take
from tests.distributed import wait_for


@pytest.fixture(scope="module")
def other(vocab, tmp_path_factory):
    """A second source, of the same vocabulary."""
    folder = tmp_path_factory.mktemp("other")
    path = write_wiki(folder / "wiki", make_documents(25, seed=9))
    build(folder / "built", vocab, [path])
    return open_shards(folder / "built", "train")


def test_stream_from_k_is_the_stream_without_its_first_k(train):
    whole = samples_of(take(stream([train]), 160))
    for start in (8, 64, 152):
        rest = samples_of(take(stream([train], start=start), 160 - start))
        assert rest == {position: whole[position] for position in range(start, 160)}


@pytest.mark.parametrize("objective", ["sop", "nsp"])
@pytest.mark.parametrize("ranks, workers, micro", [(1, 2, 4), (2, 1, 1), (4, 0, 2), (4, 3, 2)])
def test_ranks_workers_and_micro_batches_change_nothing(train, objective, ranks, workers, micro):
    config = StreamConfig(objective=objective, sequence_length=SEQUENCE_LENGTH, seed=3)
    steps = 12
    expected = samples_of(take(stream([train], config, micro=8), steps * BATCH))
    samples = {}
    for rank in range(ranks):
        batches = stream([train], config, rank=rank, ranks=ranks, workers=workers, micro=micro)
        share = list(take(batches, steps * BATCH // ranks))
        for step in range(steps):  # every step gives every rank its share, in order
            per_step = BATCH // ranks // micro
            ids = sum((b.sample_ids for b in share[step * per_step : (step + 1) * per_step]), [])
            assert ids == list(range(step * BATCH + rank, (step + 1) * BATCH, ranks))
        samples |= samples_of(share)
    assert samples == expected


def test_workers_make_two_steps_ahead(train, monkeypatch):
    made = multiprocessing.Value("i", 0)
    read = MicroBatchReader.read

    def count(self, *args):
        with made.get_lock():
            made.value += 1
        return read(self, *args)

    monkeypatch.setattr(MicroBatchReader, "read", count)
    batches = stream([train], micro=1, workers=1)  # 8 micro-batches a step
    next(batches)
    wait_for(lambda: made.value >= 2 * BATCH, "the batches of two steps")


def test_a_worker_frees_nothing_that_the_trainer_has_dropped(train, monkeypatch):
    freed = multiprocessing.Value("i", 0)
    read = MicroBatchReader.read

    class Dropped:
        def __init__(self):
            self.itself = self  # garbage, which only the collector finds

        def __del__(self):
            freed.value = os.getpid()

    def collect_and_read(self, *args):
        gc.collect()
        return read(self, *args)

    monkeypatch.setattr(MicroBatchReader, "read", collect_and_read)
    gc.collect()
    gc.disable()
    try:
        Dropped()
        next(stream([train], workers=1))
        assert freed.value == 0
    finally:
        gc.enable()
    gc.collect()
    assert freed.value == os.getpid()


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


def test_mixture_has_exact_shares_and_one_position(train, other):
    weights = [1.0, 3.0]
    batches = list(take(stream([train, other], weights=weights), 480))
    drawn = samples_of(batches)
    own = {tuple(s.ids.tolist()) for s in stored_sequences(train)}
    config = StreamConfig(
        sequence_length=SEQUENCE_LENGTH, seed=3, short_fraction=0, objective="none"
    )
    plain = samples_of(take(stream([train, other], config, weights=weights), 480))
    count = sum(tuple(i for i in restore(s) if i not in (CLS, SEP)) in own for s in plain.values())
    assert 90 < count < 150  # exact over a block of 10,000, tested with the order
    rest = samples_of(take(stream([train, other], weights=weights, start=200), 280))
    assert rest == {position: drawn[position] for position in range(200, 480)}


def test_held_out_batches_are_fixed_and_alike_on_every_rank(built):
    source = open_shards(built, "heldout")
    total = int(source.sizes.sum())
    for limit, ranks, micro in [(7, 1, 2), (7, 4, 1), (10**6, 3, 2), (1, 4, 1)]:
        sizes = {"limit": limit, "micro_batch_size": micro, "dp_size": ranks}
        runs = [
            [list(heldout_batches(source, CONFIG, dp_rank=rank, **sizes)) for rank in range(ranks)]
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
                described = ("packed", "lengths", "max_seqlen")  # the tensors
                counts = [f.name for f in fields(batch) if f.name not in described]
                assert not any(getattr(batch, name) for name in counts)


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


def test_sources_share_a_vocabulary(built, documents, tmp_path):
    text = [sentence for document in documents for sentence in document]
    vocab = train_vocab(text, Normalisation(), vocab_size=100)
    build(tmp_path / "other", vocab, [write_wiki(tmp_path / "wiki", documents[:9])])
    argv = train_command([built, tmp_path / "other"], tmp_path / "run")
    with pytest.raises(UserError, match="--data .*other: its vocabulary differs from that of"):
        read_config(argv[2:], world_size=1)


def test_the_micro_batches_of_a_large_step_need_no_larger_limit_of_open_files(train):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, before[1]))
    try:
        batches = stream([train], micro=1, workers=2)
        assert len(list(itertools.islice(batches, 200))) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_workers_that_do_not_fit_the_shared_memory_are_refused(data, monkeypatch):
    """In a container they would wait for it for ever: it has 64 MB."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**6))
    plan = DataPlan(batch_size=64, stream=StreamConfig(sequence_length=64))
    given = dict(step=0, micro_batch_size=64, dp_rank=0, dp_size=1)
    with pytest.raises(UserError, match="--num-workers 9: .* /dev/shm, which has 1.0 free"):
        training_batches([open_shards(data, "train")], None, plan, num_workers=9, **given)
    batch = next(training_batches([open_shards(data, "train")], None, plan, num_workers=0, **given))
    assert batch.packed.nbytes <= BYTES_A_TOKEN * batch.tokens
