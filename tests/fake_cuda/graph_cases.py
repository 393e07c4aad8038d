"""Graphs without a trainer around them: `main` runs every case on the fake device."""

from dataclasses import replace

import numpy as np
import torch

from albert_ds.data.micro_batch import MicroBatch, collate
from albert_ds.data.stream_config import StreamConfig
from albert_ds.engine import graphs as product
from albert_ds.engine.graphs import GraphedForPretraining, Graphs
from tests.data.test_fixed_shapes import draw_sample
from tests.model.conftest import build_config

DEVICE = torch.device("cuda", 0)
CONFIG = StreamConfig(sequence_length=24)


def make(lengths: list[int], seed: int) -> MicroBatch:
    rng = np.random.default_rng(seed)
    samples = [draw_sample(n, max(1, round(0.15 * n)), rng) for n in lengths]
    return collate(samples, [*range(seed, seed + len(lengths))], CONFIG, fixed=True).pin_memory()


def open_model(*, graphs: bool) -> GraphedForPretraining:
    config = replace(build_config(), dropout=0.1)
    model = GraphedForPretraining(config, seed=3).to(DEVICE).bfloat16().train()
    model.graphs = Graphs(model) if graphs else None
    torch.manual_seed(0)
    return model


def run(model: GraphedForPretraining, batch: MicroBatch, **how) -> torch.Tensor:
    scales = torch.stack([torch.full((), x, device=DEVICE) for x in (0.1, 0.25)])
    out = model(**batch.on(DEVICE), scales=scales, **how)
    out["loss"].backward()
    return out["loss"].detach().clone()


def train(model: GraphedForPretraining, batches: list[MicroBatch]) -> list[torch.Tensor]:
    """Losses, and the gradients summed over the micro-batches."""
    losses = [run(model, batch) for batch in batches]
    return losses + [p.grad for p in model.parameters()]


def check_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))


BATCHES = [make([20, 24, 18], 10 * seed) for seed in range(4)]


def sum_over_micro_batches() -> None:
    """Gradients that a graph writes to again are not those that were handed out."""
    model = open_model(graphs=True)
    check_equal(train(model, BATCHES), train(open_model(graphs=False), BATCHES))
    assert len(model.graphs.kept) == 1 and model.graphs.take_counts()["eager_micro_batches"] == 0


def fall_back() -> None:
    """A capture that fails, and a graph that is wrong, leave the numbers of eager launches."""

    class Forgets(product.Graph):
        def fill(self, tensors: dict) -> None:
            super().fill({**tensors, "scales": torch.zeros_like(tensors["scales"])})

    def refuse(*_) -> None:
        raise torch.OutOfMemoryError("no memory")

    whole = product.Graph
    for other in (Forgets, refuse):
        product.Graph = other
        model = open_model(graphs=True)
        try:
            found = train(model, BATCHES)
        finally:
            product.Graph = whole
        check_equal(found, train(open_model(graphs=False), BATCHES))
        assert model.graphs.failure and not model.graphs.kept
        assert model.graphs.take_counts()["eager_micro_batches"] == len(BATCHES)


def make_room() -> None:
    """Two graphs are kept; a third shape waits until one has not been used for long."""
    product.MOST, product.PATIENCE = 2, 3
    shapes = [make(lengths, 0) for lengths in ([20, 24], [5, 6], [20, 24, 18])]
    model = open_model(graphs=True)
    for number in (0, 1, 2, 0, 0, 2):
        run(model, shapes[number])
    assert model.graphs.take_counts() == {"eager_micro_batches": 1, "overflowed_micro_batches": 0}
    run(model, shapes[0], overflows=True)
    assert model.graphs.take_counts() == {"eager_micro_batches": 1, "overflowed_micro_batches": 1}
    assert len(model.graphs.kept) == 2
    run(model, shapes[1])
    assert model.graphs.take_counts()["eager_micro_batches"] == 1


def main(argv: list[str]) -> None:
    sum_over_micro_batches()
    fall_back()
    make_room()
