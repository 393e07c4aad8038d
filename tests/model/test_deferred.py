"""Deferred gradients are autograd's, come one weight at a time, and add up in fp32."""

from dataclasses import replace

import pytest
import torch

from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import SIZES
from albert_ds.model.deferred import defer_weight_gradients
from tests.batches import concatenate, random_samples

CONFIG = replace(
    SIZES["albert-tiny"],
    vocab_size=60,
    embedding_size=8,
    hidden_size=16,
    num_heads=2,
    ffn_size=32,
    dropout=0.1,
)

BATCH = concatenate(random_samples(3, vocab_size=60, max_length=20, seed=0)).tensors


def build(sharing: str, *, deferred: bool, dtype=torch.float32) -> AlbertForPretraining:
    model = AlbertForPretraining(replace(CONFIG, sharing=sharing), seed=0).to(dtype).train()
    if deferred:
        defer_weight_gradients(model.albert.encoder)
    return model


def take_gradients(model: AlbertForPretraining) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # of dropout
    outputs = model(**BATCH)
    (outputs["mlm_loss_sum"] + outputs["pair_loss_sum"]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("sharing", ["all", "attention", "ffn", "none"])
def test_gradients_are_those_of_autograd(sharing):
    expected = take_gradients(build(sharing, deferred=False, dtype=torch.float64))
    model = build(sharing, deferred=True, dtype=torch.float64)
    for _ in range(2):  # what a step held is gone in the next
        model.zero_grad()
        found = take_gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def test_every_weight_comes_once_after_the_last_use_and_before_the_embedding():
    model = build("all", deferred=True)
    order = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    take_gradients(model)
    assert len(order) == len(set(order)) == len(list(model.parameters()))
    matrices = [n for n in order if n.startswith("albert.encoder") and "layer_norm" not in n]
    begins = order.index(matrices[0])
    assert order[begins : begins + len(matrices)] == matrices  # one after the other
    assert all(n.startswith("albert.embeddings") for n in order[begins + len(matrices) :])


def test_uses_add_up_in_fp32():
    # bf16 cannot see 256 + 1: adding a use at a time, the small ones are lost.
    linear = torch.nn.Linear(1, 1, bias=True).to(torch.bfloat16)
    uses = [1.0] * 16 + [256.0]  # backward begins with the last
    encoder = torch.nn.Module()
    encoder.attention, encoder.ffn = torch.nn.ModuleList([linear]), torch.nn.ModuleList()
    encoder.forward = lambda: sum(
        linear(torch.tensor([[x]], dtype=torch.bfloat16, requires_grad=True)).float() for x in uses
    )
    defer_weight_gradients(encoder)
    encoder().sum().backward()
    assert linear.weight.grad.item() == 272.0
