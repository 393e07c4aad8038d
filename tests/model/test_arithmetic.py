"""Parameter counts and FLOPs, against the paper and against what torch counts."""

from dataclasses import replace

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.config import SIZES, count_flops
from albert_ds.model.shapes import count_params
from tests.model.conftest import build_batch, build_config

ENCODER = ("embeddings", "attention", "ffn", "pooler")  # what the paper's tables count


def count_encoder(config) -> int:
    return sum(count_params(config)[part] for part in ENCODER)


def test_parameters_are_those_of_table_1():
    counts = {name: count_encoder(config) for name, config in SIZES.items() if "tiny" not in name}
    assert counts == {
        "albert-base": 11_683_584,
        "albert-large": 17_683_968,
        "albert-xlarge": 58_724_864,
        "albert-xxlarge": 222_595_584,  # the paper prints 235M, which this shape cannot have
        "bert-base": 109_081_344,
        "bert-large": 334_607_360,
        "bert-xlarge": 1_275_291_648,
    }
    assert sum(count_params(SIZES["albert-base"]).values()) == 11_813_810  # with both heads
    assert sum(count_params(SIZES["albert-xxlarge"]).values()) == 223_158_450


def test_parameters_are_those_of_table_4():
    expected = {
        (128, "all"): 11_683_584,  # the paper: 12M
        (128, "attention"): 63_647_232,  # 64M
        (128, "ffn"): 37_686_528,  # 38M
        (128, "none"): 89_650_176,  # 89M
        (768, "all"): 31_114_752,  # 31M
        (768, "attention"): 83_078_400,  # 83M
        (768, "ffn"): 57_117_696,  # 57M
        (768, "none"): 109_081_344,  # 108M
        (128, "groups:3"): 25_859_328,
    }
    base = SIZES["albert-base"]
    counts = {
        (width, sharing): count_encoder(replace(base, embedding_size=width, sharing=sharing))
        for width, sharing in expected
    }
    assert counts == expected


def test_additions_and_heads_have_their_part():
    """Of 12 layers of width 768: two norms, two factors, a vector, six products of rank 2."""
    base = SIZES["albert-base"]
    words = {"norm": 4 * 768, "scale": 2, "position": 768, "lora:2": 2 * (10 * 768 + 2 * 3072)}
    for word, size in words.items():
        counts = count_params(replace(base, per_layer=word))
        assert counts["per_layer"] == 12 * size, word
        norms = 4 * 768 if word == "norm" else 0  # in place of the shared ones
        assert sum(counts.values()) == 11_813_810 + 12 * size - norms, word
    assert sum(count_params(replace(base, pair_head=False)).values()) == 11_813_810 - 592_130


@pytest.mark.parametrize(("embedding_size", "rank"), [(16, 0), (32, 0), (16, 3)])
def test_flops_are_those_of_the_matrix_products(embedding_size, rank):
    lengths = [7, 30, 12]
    masked = 9
    per_layer = f"lora:{rank}" if rank else "none"
    config = build_config(embedding_size=embedding_size, sharing="all", per_layer=per_layer)
    model = AlbertForPretraining(config)
    batch = build_batch(lengths, masked=masked)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        losses = model(**batch)
        (losses["mlm_loss_sum"] + losses["pair_loss_sum"]).backward()
    pooler_and_pairs = 6 * len(lengths) * (32 * 32 + 32 * 2)
    counted = counter.get_total_flops() - pooler_and_pairs
    squares = sum(length**2 for length in lengths)
    # Of the last layer only the masked and each [CLS] are computed, but for K and V: what is left
    # out is a query, an output and a feed-forward map, and a row of scores and mix.
    h = 32
    f = 48
    ends = batch["cu_seqlens"].tolist()
    read = [*batch["masked_positions"].tolist(), *ends[:-1]]
    unread = [
        end - start - sum(start <= token < end for token in read)
        for start, end in zip(ends, ends[1:], strict=False)
    ]
    scores = sum(length * rows for length, rows in zip(lengths, unread, strict=True))
    narrow = rank * (2 * 2 * h + 2 * (h + f))  # of query, output, up and down
    left_out = 6 * (sum(unread) * (2 * h * h + 2 * h * f + narrow) + scores * 2 * h)
    assert counted + left_out == count_flops(
        config, tokens=sum(lengths), squared_lengths=squares, masked=masked
    )
