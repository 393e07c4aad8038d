"""The encoder's fast forms compute what the plain one does."""

import pytest
import torch

from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.shared_linear import SharedLinear
from tests.batches import concatenate, random_samples

BATCH = concatenate(random_samples(3, vocab_size=60, max_length=20, seed=0)).tensors
FORMS = (["qkv"], ["gradients"], ["qkv", "gradients"])


def take_step(config, fast=(), checkpointing="none", dtype=torch.float64):
    """Outputs, and every gradient of the second of two passes."""
    model = AlbertForPretraining(config, activation_checkpointing=checkpointing).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    model.albert.encoder.make_fast(fast)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(0)  # of dropout
        outputs = model(**BATCH)
        (outputs["mlm_loss_sum"] + outputs["pair_loss_sum"]).backward()
    return outputs, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("fast", FORMS, ids="-".join)
@pytest.mark.parametrize(
    ("sharing", "checkpointing", "per_layer"),
    [
        *(("all", "none", "none"), ("all", "block", "norm,scale,position,lora:2")),
        *(("attention", "attention", "none"), ("none", "none", "none")),
        *(("cycle:2", "attention", "lora:2"), ("cycle-rev:2", "block", "position")),
        ("pattern:0,0,1/0,1,1", "none", "norm,scale"),
    ],
)
def test_losses_and_gradients_are_the_plain_ones(
    make_config, sharing, checkpointing, per_layer, fast
):
    config = make_config(
        vocab_size=60, num_layers=3, dropout=0.1, sharing=sharing, per_layer=per_layer
    )
    outputs, gradients = take_step(config)
    found = take_step(config, fast, checkpointing)
    torch.testing.assert_close(found[0], outputs, rtol=1e-6, atol=0)  # sums in fp32
    torch.testing.assert_close(found[1], gradients, rtol=1e-9, atol=1e-12)


def test_gradients_of_all_layers_are_summed_in_fp32():
    # 16 bits cannot see 256 + 1: added one at a time, the small ones are lost.
    weight, bias = (torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in ((1, 1), 1))
    linear = SharedLinear(weight, bias, fuses_sums=True)
    uses = [1.0] * 16 + [256.0]  # backward begins with the last
    sum(linear(torch.tensor([[x]], dtype=torch.bfloat16)).float() for x in uses).sum().backward()
    assert (weight.grad.item(), bias.grad.item()) == (272, 17)
