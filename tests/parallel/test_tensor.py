"""Tensor parallelism in bf16 rounds partial sums only; dropout agrees on replicas, not on shards.

That it changes no result in fp32: test_exactness.py.
"""

from dataclasses import replace
from functools import partial

import torch

from tests.batches import concatenate, random_samples
from tests.distributed import run_ranks
from tests.runs import SMALL, join

SAMPLES = random_samples(6, vocab_size=SMALL.vocab_size, max_length=32, seed=0)


def loss_of(model, tensors) -> torch.Tensor:
    outputs = model(**tensors)
    return outputs["mlm_loss_sum"] + outputs["pair_loss_sum"]


class Copies(torch.autograd.Function):
    """One view of a tensor for each peer; backward adds their gradients before anything else."""

    @staticmethod
    def forward(ctx, x, number):
        return tuple(x.clone() for _ in range(number))

    @staticmethod
    def backward(ctx, *gradients):
        return sum(gradients[1:], gradients[0]), None


def multiply(x, linear, peer: int, number: int, *, rows: bool = False):
    """The product with one peer's shard of a linear layer; `rows` is without the bias."""
    weight = linear.weight.chunk(number, 1 if rows else 0)[peer]
    product = x @ weight.t()
    return product if rows else product + linear.bias.chunk(number)[peer]


def attend_in_parts(
    module, number: int, x, cu_seqlens, max_seqlen, output_positions, own, joined, draws
):
    """SelfAttention.forward as `number` tensor-parallel peers compute it, in one process."""
    q_ends = cu_seqlens
    if output_positions is not None:
        q_ends = torch.searchsorted(output_positions, cu_seqlens, out_int32=True)
    assert own is None
    parts = []
    for peer, y in enumerate(Copies.apply(x, number)):
        three = (module.query, module.key, module.value)
        weight = torch.cat([p.weight.chunk(number)[peer] for p in three])
        bias = torch.cat([p.bias.chunk(number)[peer] for p in three])
        width = len(bias) // 3
        if output_positions is None:
            products = (y @ weight.t() + bias).chunk(3, dim=1)
        else:
            q = y[output_positions] @ weight[:width].t() + bias[:width]
            products = q, *(y @ weight[width:].t() + bias[width:]).chunk(2, dim=1)
        q, k, v = (z.unflatten(1, (-1, module.head_dim)) for z in products)
        heads = module.core(q, k, v, q_ends, cu_seqlens, max_seqlen).flatten(1)
        parts.append(multiply(heads, module.output, peer, number, rows=True))
    return sum(parts[1:], parts[0]) + module.output.bias


def feed_in_parts(module, number: int, x, own):
    """FeedForward.forward as `number` tensor-parallel peers compute it, in one process."""
    parts = [
        multiply(
            torch.nn.functional.gelu(multiply(y, module.up, peer, number), approximate="tanh"),
            *(module.down, peer, number),
            rows=True,
        )
        for peer, y in enumerate(Copies.apply(x, number))
    ]
    return sum(parts[1:], parts[0]) + module.down.bias


def round_in_parts(rank: int, tensor_parallel: int, config):
    """bf16 gradients: (this size against one process, against one that rounds the same sums)."""
    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.parallel.mesh import shard, shard_dim
    from albert_ds.parallel.tensor import apply_tensor_parallel

    _, mesh = join(tensor_parallel)
    tensors = concatenate(SAMPLES).tensors
    networks = [AlbertForPretraining(config, seed=3) for _ in range(3)]
    model, whole, parts = networks
    apply_tensor_parallel(model, mesh)
    for block in parts.albert.encoder.attention:
        block.self_attention.forward = partial(
            attend_in_parts, block.self_attention, tensor_parallel
        )
    for block in parts.albert.encoder.ffn:
        block.feed_forward.forward = partial(feed_in_parts, block.feed_forward, tensor_parallel)
    for network in networks:
        loss_of(network.bfloat16(), tensors).backward()
    errors = []
    for reference in (whole, parts):
        parameters = dict(reference.named_parameters())
        distances = {}
        for name, p in model.named_parameters():
            goal = shard(parameters[name].grad, shard_dim(p), mesh).float()
            if "key.bias" not in name:  # its true gradient is 0
                distances[name] = float((p.grad.float() - goal).norm() / goal.norm())
        errors.append(distances)
    return errors


def test_in_bf16_it_differs_from_one_process_only_by_rounding_partial_sums():
    for plain, same_sums in run_ranks(round_in_parts, 2, 2, SMALL):
        assert max(plain.values()) > 1e-3  # bf16 shows the order of sums
        for name, error in same_sums.items():
            assert error <= 0.01 * max(plain.values()), (name, error, plain[name])


def drop_both(rank: int, config):
    return [drop(config, checkpointing) for checkpointing in ("none", "block")]


def drop(config, checkpointing: str):
    """Dropout on this rank: hidden state, attention output of its heads, gradients."""
    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.parallel.random import seed_step
    from albert_ds.parallel.tensor import apply_tensor_parallel

    _, mesh = join(2)
    model = AlbertForPretraining(config, seed=3, activation_checkpointing=checkpointing)
    apply_tensor_parallel(model, mesh)
    tensors = concatenate(SAMPLES).tensors
    inputs = {k: v for k, v in tensors.items() if "masked" not in k and "pair" not in k}
    seed_step(0, 5, mesh.dp_rank)
    with torch.no_grad():
        hidden = model.albert(**inputs)["last_hidden_state"]
    # Every head is given the same input, so that only the dropout can tell two ranks apart.
    core = model.albert.encoder.attention[0].self_attention.core
    same = torch.ones(int(tensors["cu_seqlens"][-1]), 2, 8)
    with torch.no_grad():
        ends = (tensors["cu_seqlens"], tensors["cu_seqlens"], tensors["max_seqlen"])
        heads = core(same, same, same, *ends)
    seed_step(0, 6, mesh.dp_rank)
    loss_of(model, tensors).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return hidden, heads, gradients


def test_dropout_agrees_on_replicas_differs_on_shards_and_is_replayed_by_checkpointing():
    config = replace(SMALL, dropout=0.3)
    plain, again = zip(*run_ranks(drop_both, 2, config), strict=True)
    (hidden0, heads0, gradients0), (hidden1, heads1, gradients1) = plain
    assert torch.equal(hidden0, hidden1)
    assert not torch.equal(heads0, heads1)
    assert torch.equal(gradients0["albert.pooler.weight"], gradients1["albert.pooler.weight"])
    for (_, _, kept), (_, _, replayed) in zip(plain, again, strict=True):
        for name, gradient in kept.items():
            assert torch.allclose(replayed[name], gradient, atol=1e-6), name


def drift(rank: int, name: str):
    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.parallel.mesh import find_drift
    from albert_ds.parallel.tensor import apply_tensor_parallel

    _, mesh = join(2)
    model = AlbertForPretraining(SMALL, seed=3)
    apply_tensor_parallel(model, mesh)
    before = find_drift(model, mesh)
    if rank == 1:
        parameter = dict(model.named_parameters())[name].data.view(-1)
        parameter[:2] = parameter[:2].flip(0)  # the same values, two of them changed places
    return before, find_drift(model, mesh)


def test_drift_of_a_replica_is_found():
    name = "albert.embeddings.projection.weight"
    assert run_ranks(drift, 2, name) == [([], [name])] * 2
