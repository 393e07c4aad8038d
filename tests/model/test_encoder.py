"""Parts of the encoder: heads that are divided, blocks that layers share."""

import torch

from albert_ds.model.encoder import Encoder, SelfAttention

CU_SEQLENS, LONGEST = torch.tensor([0, 5, 6, 23, 25, 65], dtype=torch.int32), 40


def test_a_part_of_the_projections_holds_a_part_of_the_heads(make_config):
    config = make_config(num_heads=4)
    whole = SelfAttention(config)
    x = torch.randn(int(CU_SEQLENS[-1]), 32)
    expected = whole(x, CU_SEQLENS, LONGEST)
    parts = 0
    for half in (slice(0, 16), slice(16, 32)):
        part = SelfAttention(config)
        for name in ("query", "key", "value"):
            linear = torch.nn.Linear(32, 16)
            linear.weight.data = getattr(whole, name).weight[half]
            linear.bias.data = getattr(whole, name).bias[half]
            setattr(part, name, linear)
        part.output = torch.nn.Linear(16, 32, bias=False)
        part.output.weight.data = whole.output.weight[:, half]
        parts = parts + part(x, CU_SEQLENS, LONGEST)
    torch.testing.assert_close(parts + whole.output.bias, expected)


def test_layers_that_share_are_one_object(make_config):
    encoder = Encoder(make_config(sharing="attention"))
    assert (len(encoder.attention), len(encoder.ffn)) == (1, 4)
    encoder = Encoder(make_config(sharing="ffn"))
    assert (len(encoder.attention), len(encoder.ffn)) == (4, 1)
