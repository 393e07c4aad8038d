"""The table of sizes, the ways of sharing, and the words a wrong shape is refused with."""

import pytest

from albert_ds.base.errors import UserError
from albert_ds.model.config import SIZES, reshape
from albert_ds.model.shapes import build_shapes, count_params
from albert_ds.model.sharing import name_plan, share
from tests.model.conftest import build_config
from tests.reference import PLANS

# The paper's Table 1, with the heads of the release:
# layers, hidden, embedding, heads, feed-forward, sharing, dropout.
TABLE_1 = {
    "albert-base": (12, 768, 128, 12, 3072, "all", 0.1),
    "albert-large": (24, 1024, 128, 16, 4096, "all", 0.1),
    "albert-xlarge": (24, 2048, 128, 16, 8192, "all", 0.1),
    "albert-xxlarge": (12, 4096, 128, 64, 16384, "all", 0),
    "bert-base": (12, 768, 768, 12, 3072, "none", 0.1),
    "bert-large": (24, 1024, 1024, 16, 4096, "none", 0.1),
    "bert-xlarge": (24, 2048, 2048, 32, 8192, "none", 0.1),
}
FIELDS = (
    "num_layers",
    "hidden_size",
    "embedding_size",
    "num_heads",
    "ffn_size",
    "sharing",
    "dropout",
)


def test_sizes_are_table_1():
    table = {name: tuple(getattr(size, f) for f in FIELDS) for name, size in SIZES.items()}
    assert table.pop("albert-tiny")[1] <= 256
    assert table == TABLE_1
    assert {size.vocab_size for size in SIZES.values()} == {30_000}
    assert {size.max_position_embeddings for size in SIZES.values()} == {512}


def test_sharing_names_the_blocks_of_each_layer():
    assert {sharing: share(sharing, 4) for sharing in PLANS} == PLANS
    for plan in PLANS.values():
        assert share(name_plan(plan), 4) == plan


def test_cycle_rev_goes_backwards_once():
    """Algorithm 1 of Takase and Kiyono: 12 layers of 4 blocks are 1234 1234 4321."""
    blocks = [attention for attention, _ in share("cycle-rev:4", 12)]
    assert blocks == [0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("sharing", "per_layer", "depths"),
    [
        ("all", "none", {1, 2, 3, 5, 7}),
        ("cycle:2", "none", {2, 3, 5, 7}),
        ("groups:2", "none", {2}),
        ("attention", "none", set()),
        ("pattern:0,0,1,0", "none", set()),
        ("all", "scale", {1, 2, 3}),
        ("groups:2", "scale", {2}),
        ("loop:1,1x2,1", "none", {3, 5, 7}),
        ("loop:1,1x2,1", "scale,inject", {3}),
    ],
)
def test_other_depths_use_the_same_blocks(sharing, per_layer, depths):
    config = build_config(sharing=sharing, per_layer=per_layer)
    allowed = set()
    for depth in (1, 2, 3, 5, 7):
        try:
            other = config.at_depth(depth)
        except UserError as refused:
            assert sharing in str(refused) or per_layer in str(refused)
            continue
        allowed.add(depth)
        more, counts = ({**count_params(c), "per_layer": 0} for c in (other, config))
        assert more == counts and other.num_layers == depth
    assert allowed == depths and config.at_depth(4) is config


@pytest.mark.parametrize(
    ("sharing", "depth", "layers"),
    [
        ("all", 2, [0, 1]),
        ("groups:2", 4, [0, 1, 3, 4]),
        ("cycle-rev:2", 4, [0, 1, 3, 5]),
        ("loop:1,2x2,1", 4, [0, 1, 2, 5]),
    ],
)
def test_layers_that_run_are_the_first_with_their_blocks(sharing, depth, layers):
    config = build_config(sharing=sharing, num_layers=6, per_layer="scale")
    assert config.running_layers(depth) == layers
    assert config.running_layers(6) == [*range(6)]


def test_a_loop_says_its_layers():
    config = reshape(build_config(), sharing="loop:1,2x4,1")
    assert config.num_layers == 10 and config.num_blocks == (4, 4)
    assert [attention for attention, _ in config.plan] == [0, 1, 2, 1, 2, 1, 2, 1, 2, 3]
    assert reshape(build_config(), sharing="cycle:2").num_layers == 4
    with pytest.raises(UserError, match="is 10 layers, --num-layers is 8"):
        reshape(build_config(), sharing="loop:1,2x4,1", num_layers=8)
    with pytest.raises(UserError, match="has 1 . 2 x R . 1 layers, R at least 1"):
        config.at_depth(5)


LOOPS = {
    "all": {0, 1, 2, 3, 4, 5},
    "cycle:3": {0, 3},
    "groups:2": {0, 1, 2, 3, 4, 5},
    "loop:1,2x2,1": {1, 3},
    "loop:0,3x2,0": {0, 3},
    "pattern:0,1,1,2,2,3": {1, 2, 3, 4},
}


def test_layers_that_begin_a_loop_have_the_injection():
    for sharing, begins in LOOPS.items():
        config = build_config(sharing=sharing, num_layers=6, per_layer="inject")
        names = (name.split(".") for name in build_shapes(config) if ".own." in name)
        assert {int(words[3]) for words in names} == begins, sharing
    with pytest.raises(UserError, match="inject needs layers that run again; with --sharing none"):
        reshape(build_config(), sharing="none", per_layer="inject")


WRONG = [
    ("embedding_size", -4, "--embedding-size -4: must be at least 1"),
    ("dropout", float("nan"), "--dropout nan: must be at least 0 and below 1"),
    ("initializer_range", 0.0, "initializer_range 0.0: must be above 0"),
    ("type_vocab_size", 10**30, f"type_vocab_size {10**30}: must be at least 1 and at"),
    ("sharing", "groups:3", "--sharing groups:3: 3 does not divide --num-layers 4"),
    ("sharing", "groups:0", "--sharing groups:0: '0' must be a whole number from 1 to"),
    ("sharing", "groups:-2", "--sharing groups:-2: '-2' must be a whole number from 1"),
    ("sharing", "all:2", "--sharing all:2: must be all, attention, ffn, none, groups:N,"),
    ("sharing", "cycle", "--sharing cycle: must be all, attention, ffn, none, groups:N,"),
    ("sharing", "cycle:5", "--sharing cycle:5: '5' must be a whole number from 1 to --num-la"),
    ("sharing", "loop:1,2x0,1", "--sharing loop:1,2x0,1: '1,2x0,1' must be P,CxR,D"),
    ("sharing", "loop:1,2x4,1", "--sharing loop:1,2x4,1: is 10 layers, --num-layers is 4"),
    ("sharing", "pattern:0,1", "--sharing pattern:0,1: names 2 blocks for --num-layers 4"),
    ("sharing", "pattern:0,2,2,0", "--sharing pattern:0,2,2,0: '0,2,2,0' must number its"),
    ("sharing", "pattern:0,x,2,0", "--sharing pattern:0,x,2,0: '0,x,2,0' must be block num"),
    ("sharing", "pattern:0,0,0,0/0,0,0,0/0,0,0,0", "--sharing pattern:0,0,0,0/0,0,0,0/0,0"),
    ("per_layer", "lora", "--per-layer lora: 'lora' must be one of norm, scale, position, "),
    ("per_layer", "lora:0", "--per-layer lora:0: 'lora:0' must be one of norm, scale, posi"),
    ("per_layer", "norm,norm", "--per-layer norm,norm: names norm twice"),
    ("per_layer", "norm,none", "--per-layer norm,none: 'none' must be one of norm, scale,"),
]


def test_a_wrong_shape_is_refused_by_its_flag():
    for name, value, words in WRONG:
        with pytest.raises(UserError) as refused:
            build_config(**{name: value})
        assert str(refused.value).startswith(words)
