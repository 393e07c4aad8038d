"""Graphs without a trainer around them: `main` runs every case on the fake device."""

from dataclasses import replace

import numpy as np
import torch
from torch.utils._pytree import tree_map

from albert_ds.data.micro_batch import MicroBatch, collate
from albert_ds.data.stream_config import StreamConfig
from albert_ds.engine import graphs as product
from albert_ds.engine.graphs import GraphedForPretraining, Graphs
from tests.data.test_fixed_shapes import DRAWS, WAITS, draw_sample
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


def run(model: GraphedForPretraining, batch: MicroBatch, factor=1.0, **options) -> torch.Tensor:
    """A micro-batch's loss; factor: of its scales."""
    scales = torch.stack([torch.full((), x * factor, device=DEVICE) for x in (0.1, 0.25)])
    out = model(**batch.on(DEVICE), scales=scales, **options)
    out["loss"].backward()
    return out["loss"].detach().clone()


def train(model: GraphedForPretraining, batches: list[MicroBatch]) -> list[torch.Tensor]:
    """Losses, and the gradients summed over the micro-batches."""
    losses = [run(model, batch, 1 / (1 + number)) for number, batch in enumerate(batches)]
    return losses + [p.grad for p in model.parameters()]


def check_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))


# Of one shape, cut in other ways.
LENGTHS = ([20, 24, 18], [24, 20, 20], [22, 19, 20], [16, 24, 23])
BATCHES = [make(lengths, 10 * seed) for seed, lengths in enumerate(LENGTHS)]


def sum_over_micro_batches() -> None:
    """Gradients that a graph writes to again are not those that were handed out."""
    model = open_model(graphs=True)
    check_equal(train(model, BATCHES), train(open_model(graphs=False), BATCHES))
    assert len(model.graphs.kept) == 1 and model.graphs.take_counts()["eager_micro_batches"] == 0


def keep_what_was_given() -> None:
    """Eager launches beside graphs are in the graphs' memory, and what they give is not."""
    tensors = []
    for graphs in (True, False):
        model = open_model(graphs=graphs)
        outputs = []
        made = []
        for number, batch in enumerate(BATCHES):
            scales = torch.ones(2, device=DEVICE)
            outputs.append(model(**batch.on(DEVICE), scales=scales, overflows=number in (1, 3)))
            outputs[-1]["loss"].backward()
            made += [len(model.graphs.pool.made)] if graphs else []
        assert not graphs or made == [made[0], 2 * made[0], 2 * made[0], 3 * made[0]]
        tensors.append([x for output in outputs for _, x in sorted(output.items())])
        tensors[-1] += [p.grad for p in model.parameters()]
    check_equal(*tensors)


def read_launches(graph: product.Graph, model: GraphedForPretraining) -> list[tuple]:
    """Each operator, with its numbers and what its tensors are.

    Each is in memory of the graph's inputs, the model, or an earlier result, by number: a tensor
    from elsewhere is a KeyError.
    """
    places = {}
    launches = []

    def add(values) -> None:
        for x in values:
            if isinstance(x, torch.Tensor):
                places.setdefault(x.untyped_storage().data_ptr(), len(places))

    def describe(x):
        if not isinstance(x, torch.Tensor):
            return x
        place = places[x.untyped_storage().data_ptr()]
        return place, x.storage_offset(), x.dtype, x.shape, x.stride()

    add([*graph.inputs.values(), model.graphs.flat, *model.parameters(), *model.buffers()])
    for function, args, kwargs, made, _ in graph.graph.calls:
        launches.append((str(function), tree_map(describe, (args, kwargs))))
        add(made)
    return launches


def launch_alike() -> None:
    """Two micro-batches of a shape launch the same: nothing of their content, or of their place in
    the run, is in a launch."""
    model = open_model(graphs=True)
    logs = []
    for number, batch in enumerate(BATCHES[:2]):
        run(model, batch, 1 / (1 + number))
        _, graph = model.graphs.kept.popitem()  # the next one is captured anew
        logs.append(read_launches(graph, model))
    assert len(logs[0]) > 100 and logs[0] == logs[1]
    launched = {name.split(".")[1].rstrip("_") for name, _ in logs[0]}
    assert "_flash_attention_backward" in launched and not launched & (DRAWS | WAITS)


def go_on_after_a_skipped_step() -> None:
    """What a step that is not finite leaves in a graph reaches no other step."""
    for skipped in (0, 2):  # where a graph is captured, and where it is replayed
        collected = []
        for graphs in (True, False):
            model = open_model(graphs=graphs)
            for number, batch in enumerate(BATCHES):
                run(model, batch, float("nan") if number == skipped else 1.0)
                gradients = [p.grad.clone() for p in model.parameters()]
                assert gradients[0].isfinite().all() == (number != skipped)
                collected += gradients if number != skipped else []
                model.zero_grad()
            assert not graphs or model.graphs.failure is None
        check_equal(collected[: len(collected) // 2], collected[len(collected) // 2 :])


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
            numbers = train(model, BATCHES)
        finally:
            product.Graph = whole
        check_equal(numbers, train(open_model(graphs=False), BATCHES))
        assert model.graphs.failure and not model.graphs.kept and model.graphs.pool is None
        assert model.graphs.take_counts()["eager_micro_batches"] == len(BATCHES)


def make_room() -> None:
    """Two graphs are kept; a third shape waits until one has not been used for long."""
    product.MOST, product.PATIENCE = 2, 3
    shapes = [make(lengths, 0) for lengths in ([20, 24], [11], [20, 24, 18])]
    model = open_model(graphs=True)
    for number in (0, 1, 2, 0, 0, 2):
        run(model, shapes[number])
    assert model.graphs.take_counts() == {"eager_micro_batches": 1, "overflowed_micro_batches": 0}
    run(model, shapes[0], overflows=True)
    assert model.graphs.take_counts() == {"eager_micro_batches": 1, "overflowed_micro_batches": 1}
    assert len(model.graphs.kept) == 2
    run(model, shapes[1])
    assert model.graphs.take_counts()["eager_micro_batches"] == 1
    captured = []
    whole = product.Graph
    product.Graph = lambda *given: captured.append(given) or whole(*given)
    product.PATIENCE = 400
    model.graphs = Graphs(model)
    for number in range(99):
        run(model, shapes[number % 3])
    product.Graph = whole
    assert len(captured) == 2 and model.graphs.take_counts()["eager_micro_batches"] == 33


def main(argv: list[str]) -> None:
    sum_over_micro_batches()
    keep_what_was_given()
    launch_alike()
    go_on_after_a_skipped_step()
    fall_back()
    make_room()
