"""What a bucket adds to a micro-batch changes no loss, no gradient and no count."""

import itertools
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from albert_ds.data.fixed_shapes import find_step
from albert_ds.data.masking import count_predictions
from albert_ds.data.micro_batch import MicroBatch, collate
from albert_ds.data.samples import Sample
from albert_ds.data.shards import open_shards
from albert_ds.data.stream import training_batches
from albert_ds.data.stream_config import DataPlan, StreamConfig
from albert_ds.engine.graphs import MOST
from albert_ds.model import attention, dropout, fused
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.draws import draw_seeds
from albert_ds.model.even_shapes import SPARE
from albert_ds.parallel.consensus import Counts
from tests.command import run_command
from tests.data.corpus import SHARED
from tests.model.conftest import build_config

CONFIG = StreamConfig(sequence_length=24)


def draw_sample(length: int, masked: int, rng: np.random.Generator) -> Sample:
    return Sample(
        ids=rng.integers(5, 101, length),
        first=length // 2,
        positions=np.sort(rng.choice(length, masked, replace=False)),
        labels=rng.integers(5, 101, masked),
        pair_label=int(rng.integers(2)),
        used=length,
        available=length,
        starts=np.ones(length, bool),
    )


def collate_both(lengths: list[int], masked: list[int], seed: int = 0) -> list[MicroBatch]:
    rng = np.random.default_rng(seed)
    samples = [draw_sample(*pair, rng) for pair in zip(lengths, masked, strict=True)]
    ids = [*range(100 * seed, 100 * seed + len(samples))]
    return [collate(samples, ids, CONFIG, fixed=fixed) for fixed in (False, True)]


def run(micro_batch: MicroBatch) -> tuple[dict, dict]:
    model = AlbertForPretraining(build_config(), seed=3, exits={2: 0.5}, z_loss=1e-2).double()
    out = model(**micro_batch.tensors, scales=torch.tensor([0.5, 0.25], dtype=torch.float64))
    out["loss"].backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("lengths", "masked"),
    [
        ([24, 9, 17, 5], [4, 1, 3, 1]),
        ([24, 24, 24, 24], [4, 4, 4, 4]),  # as many as there may be
        ([16, 16, 16, 16], [2, 2, 2, 2]),  # a bucket's bound
        ([7, 9], [0, 0]),  # nothing to predict
        ([], []),  # a rank without a sample
    ],
)
def test_padding_changes_no_loss_and_no_gradient(lengths, masked):
    bare, padded = collate_both(lengths, masked)
    assert not padded.overflows and padded.max_seqlen == CONFIG.sequence_length
    added = padded.lengths["input_ids"] - bare.lengths["input_ids"]
    assert SPARE <= added < SPARE + find_step(24 * max(len(lengths), 1))
    assert padded.lengths["input_ids"] % SPARE == 0 or not lengths
    assert Counts.of(bare) == Counts.of(padded)
    for bare_values, padded_values in zip(run(bare), run(padded), strict=True):
        for name, value in bare_values.items():
            torch.testing.assert_close(padded_values[name], value, rtol=1e-12, atol=1e-13, msg=name)


def check_queries(padded: MicroBatch) -> None:
    """Attention takes no more queries of a sequence than it is told."""
    tensors = padded.tensors
    ends = tensors["cu_seqlens"]
    tokens = len(tensors["input_ids"])
    assert ends[-1] == tokens and 0 <= ends.diff().min() <= ends.diff().max() <= padded.max_seqlen
    first = ends[:-1].clamp(max=tokens - 1)
    positions = torch.cat([first, tensors["masked_positions"]]).sort().values
    assert positions.max() < tokens
    queries = torch.searchsorted(positions, ends.long()).diff()
    assert int(queries.max()) <= padded.max_seqlen


def test_attention_takes_no_more_queries_of_a_sequence_than_it_is_told():
    for lengths in ([24, 24, 24, 20], [5, 5, 5, 5], [24] * 30 + [11]):
        check_queries(collate_both(lengths, [max(1, round(0.15 * n)) for n in lengths])[1])


@pytest.mark.parametrize(
    ("size", "length", "fraction"),
    [
        (64, 512, 0.15),  # 76.8 are rounded to 77
        (8, 512, 0.15),
        (256, 512, 0.15),
        (64, 50, 0.15),  # 7.5 to 8
        (128, 128, 0.15),  # 19.2 to 19
        (1024, 128, 0.15),
        (64, 256, 0.4),  # 102.4 to 102
        (64, 64, 0.025),  # 1.6 to 2
    ],
)
def test_full_rows_fit_though_all_their_predictions_round_alike(size, length, fraction):
    """All rows of a micro-batch, and beside rows of other lengths."""
    rng = np.random.default_rng(0)
    config = StreamConfig(sequence_length=length, masked_fraction=fraction)
    for full in [size] * 2 + [size * 9 // 10] * 8:
        lengths = [length] * full + rng.integers(length // 2, length, size - full).tolist()
        masked = [count_predictions(n, fraction, None) for n in lengths]
        samples = [draw_sample(*pair, rng) for pair in zip(lengths, masked, strict=True)]
        padded = collate(samples, [*range(size)], config, fixed=True)
        assert not padded.overflows
        check_queries(padded)


def test_shapes_follow_from_the_number_of_tokens_alone():
    """Of predictions fewer or more, and of sequences cut in other ways."""
    shapes = set()
    for lengths, masked in (([20, 20, 20], [3, 3, 3]), ([24, 24, 12], [3, 4, 1])):
        shapes.add(tuple(collate_both(lengths, masked)[1].lengths.values()))
    assert len(shapes) == 1


def test_more_predictions_than_a_bucket_holds_stay_as_they_are():
    bare, padded = collate_both([24, 24], [20, 20])
    assert padded.overflows and torch.equal(bare.packed, padded.packed)
    assert padded.max_seqlen == bare.max_seqlen


def test_a_token_s_seed_follows_from_its_sample_and_place():
    lengths = np.array([5, 3, 7, 4])
    whole = draw_seeds(7, [10, 11, 12, 13], lengths)
    parts = [draw_seeds(7, [10, 11], lengths[:2]), draw_seeds(7, [12, 13], lengths[2:])]
    assert np.array_equal(whole, np.concatenate(parts))
    assert len({*whole.tolist(), *draw_seeds(8, [10], lengths[:1]).tolist()}) == 19 + 5


@pytest.fixture(scope="module")
def wikipedia(tmp_path_factory) -> dict[int, Path]:
    """Shards of a few files of English Wikipedia, by the length of their sequences."""
    packed = SHARED / "wiki_en_2018_AA.tar.xz"
    if not packed.is_file():
        pytest.skip(f"needs {packed}")
    folder = tmp_path_factory.mktemp("wikipedia")
    with tarfile.open(packed, "r|xz") as tar:
        for file in itertools.islice(filter(tarfile.TarInfo.isfile, tar), 6):
            tar.extract(file, folder / "text", filter="data")
    vocab = folder / "vocab"
    texts = [*folder.glob("text/*/*")]
    done = run_command("vocab", "--input", *texts, "--output", vocab, "--vocab-size", 8000)
    assert done.code == 0, done.err
    shards = {length: folder / str(length) for length in (128, 512)}
    for length, output in shards.items():
        flags = ("--vocab", vocab / "spiece.model", "--sequence-length", length, "--holdout", 0)
        done = run_command("shards", "--input", *texts, "--output", output, *flags)
        assert done.code == 0, done.err
    return shards


@pytest.mark.nightly
@pytest.mark.parametrize(("micro_batch_size", "length"), [(64, 512), (8, 512), (128, 128)])
def test_few_shapes_of_wikipedia_waste_little(micro_batch_size, length, wikipedia):
    """At most 3 % of tokens and of scored rows, in no more shapes than a run keeps graphs."""
    stream = StreamConfig(sequence_length=length)
    plan = DataPlan(batch_size=micro_batch_size, stream=stream)
    batches = training_batches(
        [open_shards(wikipedia[length], "train")],
        None,
        plan,
        step=0,
        micro_batch_size=micro_batch_size,
        dp_rank=0,
        dp_size=1,
        fixed_shapes=True,
    )
    taken = [next(batches) for _ in range(4096 // micro_batch_size)]
    assert not any(batch.overflows for batch in taken)
    for name, real in (("input_ids", "tokens"), ("masked_positions", "masked")):
        all_rows = sum(batch.lengths[name] for batch in taken)
        counted = sum(getattr(batch, real) for batch in taken)
        assert counted < all_rows <= 1.03 * counted
    assert len({tuple(batch.lengths.values()) for batch in taken}) <= MOST


DRAWS = {"rand", "randn", "random", "uniform", "bernoulli", "native_dropout", "randint", "randperm"}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "item", "unique_dim", "_unique2"}


def test_nothing_of_a_micro_batch_is_baked_into_the_launches_of_its_shape(monkeypatch):
    """As CUDA computes it: a trace of one micro-batch, run on another, gives that one's numbers."""

    def attend(self, q, k, v, q_ends, kv_ends, max_seqlen, draws=None):
        return attention.attend_padded(q, k, v, q_ends, kv_ends, (max_seqlen, max_seqlen))

    def drop(x, probability, draws=None):
        return dropout.drop_rows(x, probability, draws.seeds, draws.number())

    monkeypatch.setattr(attention.VarlenAttention, "forward", attend)
    monkeypatch.setattr(dropout, "drop", drop)
    monkeypatch.setattr(fused, "drop", drop)
    config = build_config(dropout=0.1)
    model = AlbertForPretraining(config, seed=3, exits={2: 0.5}, z_loss=1e-2).double()
    parameters = dict(model.named_parameters())

    def compute(tensors: dict, scales: torch.Tensor, parameters: dict) -> dict:
        given = {**tensors, "max_seqlen": CONFIG.sequence_length, "scales": scales}
        out = torch.func.functional_call(model, parameters, (), given)
        back = torch.autograd.grad(out["loss"], [*parameters.values()], allow_unused=True)
        return {**out, **dict(zip(parameters, back, strict=True))}

    given, traces = [], []
    for number, sizes in enumerate((([20, 20, 20], [3, 3, 3]), ([24, 24, 12], [3, 4, 1]))):
        tensors = collate_both(*sizes, seed=number)[1].tensors
        tensors.pop("max_seqlen")
        scales = torch.tensor([0.5, 0.25], dtype=torch.float64) / (number + 1)
        given.append((tensors, scales, parameters))
        traces.append(make_fx(compute)(*given[-1]))
    one, other = traces
    assert one.code == other.code and "_tensor_constant" not in one.code
    launched = {
        str(node.target).split(".")[-2].rstrip("_")
        for node in one.graph.nodes
        if "." in str(node.target)
    }
    assert {"embedding", "index_select", "mm"} <= launched and not launched & (DRAWS | WAITS)
    for trace, others in ((one, given[1]), (other, given[0])):
        expected = compute(*others)
        with torch.no_grad():
            outputs = trace(*others)
        assert outputs.keys() == expected.keys() and bool(expected["loss"])
        assert all(x is None or torch.equal(outputs[name], x) for name, x in expected.items())
