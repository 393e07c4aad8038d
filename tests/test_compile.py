"""Compiled blocks train the same model in every layout; layers share graphs."""

from dataclasses import replace

import pytest
import torch

from albert_ds.model.albert import AlbertForPretraining
from tests.batches import concatenate, random_samples
from tests.distributed import run_ranks
from tests.reference import update_error
from tests.training import SMALL, small_config, train_ranks

BATCHES = [
    random_samples(8, vocab_size=SMALL.vocab_size, max_length=32, seed=seed) for seed in range(3)
]


def train_and_count_graphs(rank: int, *args):
    from torch._dynamo.utils import counters

    return train_ranks(rank, *args), counters["stats"]["unique_graphs"]


OWN = "norm,scale,position,lora:2"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tensor_parallel", "stage", "checkpointing", "sharing", "per_layer"),
    [
        (2, 1, "none", "all", "none"),
        (2, 2, "attention", "cycle:2", OWN),
        (1, 3, "block", "pattern:0,0,1/0,1,1", OWN),
    ],
)
def test_compiled_blocks_give_the_same_update(
    tensor_parallel, stage, checkpointing, sharing, per_layer
):
    plain = small_config(
        world_size=2,
        tensor_parallel=tensor_parallel,
        ds_changes={"zero_optimization": {"stage": stage}},
        model=replace(SMALL, sharing=sharing, per_layer=per_layer),
        activation_checkpointing=checkpointing,
    )
    configs = [plain, replace(plain, compile=True)]
    (run, compiled), graphs = run_ranks(train_and_count_graphs, 2, configs, BATCHES)[0]
    assert graphs > 0
    assert compiled.losses == pytest.approx(run.losses, rel=1e-5)
    assert compiled.norms == pytest.approx(run.norms, rel=1e-5)
    assert update_error(compiled.weights, run.weights, run.initial) <= 1e-5


def test_a_compiled_block_gives_the_same_gradients():
    """The short form of the test above: one process, one block."""
    batch = concatenate(random_samples(6, vocab_size=101, max_length=32, seed=0))
    found = []
    for is_compiled in (False, True):
        model = AlbertForPretraining(SMALL)
        if is_compiled:
            model.albert.encoder.compile_blocks()
        outputs = model(**batch.tensors)
        (outputs["mlm_loss_sum"] + outputs["pair_loss_sum"]).backward()
        found.append((outputs, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_layers_and_lengths_share_their_graphs():
    from torch._dynamo.utils import counters

    counts = []
    for num_layers in (2, 6):
        torch._dynamo.reset()
        counters.clear()
        model = AlbertForPretraining(replace(SMALL, dropout=0.1, num_layers=num_layers))
        model.albert.encoder.compile_blocks()
        for seed, size in enumerate((6, 7, 5, 9)):  # batch sizes that equal no width of the model
            batch = concatenate(random_samples(size, vocab_size=101, max_length=32, seed=seed))
            model(**batch.tensors)["mlm_loss_sum"].backward()
            counts.append(counters["stats"]["unique_graphs"])
    assert len(set(counts)) == 1 and counts[0] > 0, counts


def test_layers_with_parameters_of_their_own_share_their_graphs():
    from torch._dynamo.utils import counters

    counts = []
    batch = concatenate(random_samples(6, vocab_size=101, max_length=32, seed=0))
    for num_layers in (2, 4):
        torch._dynamo.reset()
        counters.clear()
        config = replace(SMALL, num_layers=num_layers, per_layer="norm,scale,position,lora:2")
        encoder = (model := AlbertForPretraining(config)).albert.encoder
        for block in (*encoder.attention, *encoder.ffn):
            block.compile(dynamic=True, backend="eager")  # the graphs are counted, not run fast
        model(**batch.tensors)["mlm_loss_sum"].backward()
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[0] == counts[1] > 0
