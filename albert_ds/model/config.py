"""The shape of a model, and the paper's Table 1 as one table (sections 3.1, 3.2).

Letters used in all model files: B sequences, N tokens of a micro-batch (its sequences end to end),
P masked positions, T longest sequence a model can take, V vocabulary, E embedding size, H hidden
size, F feed-forward size, L layers, n heads, D = H / n head width.
"""

from dataclasses import dataclass, replace
from functools import partial

from albert_ds.base.cli import Range, check_ranges, flag, integer
from albert_ds.base.errors import UserError
from albert_ds.model.projections import FEED_FORWARDS, list_projections
from albert_ds.model.sharing import (
    ADDITIONS,
    Plan,
    count_named_layers,
    find_layers,
    find_loops,
    read_additions,
    resize,
    share,
)

SHAPE = "the model"
shape = partial(flag, group=SHAPE)
BY_SIZE = "that of --model"
WIDTH = integer(1, 1 << 20)
SMALL = Range(gt=0, le=1)
DROPOUT = Range(ge=0, lt=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that fixes the parameters and the function they compute.

    Raises UserError, naming the flag as it is typed, for a shape that no model can have.
    """

    vocab_size: int = 30_000  # V, pieces of the vocabulary: that of the shards
    embedding_size: int = shape("E, width of the embeddings", "UNITS", WIDTH, shown_default=BY_SIZE)
    hidden_size: int = shape("H, width of the layers", "UNITS", WIDTH, shown_default=BY_SIZE)
    num_layers: int = shape(
        "L, layers",
        "LAYERS",
        integer(1, 10_000),
        shown_default=f"that of --sharing, if it says it, else {BY_SIZE}",
    )
    # The release's count, which is not H / 64 for xlarge.
    num_heads: int = shape(
        "attention heads; must divide --hidden-size", "HEADS", WIDTH, shown_default=BY_SIZE
    )
    ffn_size: int = shape(
        "inner width of the feed-forward layer; 4 x --hidden-size if only that is typed",
        "UNITS",
        WIDTH,
        shown_default=BY_SIZE,
    )
    max_position_embeddings: int = shape(
        "longest sequence that the model can take",
        "TOKENS",
        integer(1, 1 << 20),
        default=512,
        shown_default=BY_SIZE,
    )
    type_vocab_size: int = 2  # segments A and B
    dropout: float = shape(
        "probability of dropout on embeddings, attention and both sublayers' outputs",
        "P",
        DROPOUT,
        shown_default="0 for albert-xxlarge, 0.1 for the others",
    )
    sharing: str = shape(
        "which blocks the layers use, as in the table below",
        "HOW",
        default="all",
        shown_default="all; none for BERT",
    )
    per_layer: str = shape(
        "what each layer has of its own, with commas between, as in the table below",
        "WHAT",
        default="none",
    )
    initializer_range: float = 0.02  # standard deviation of the truncated normal
    layer_norm_eps: float = 1e-12  # the release's
    square_map: bool = False  # a map E -> H also if E = H, as a model of Hugging Face may have
    pair_head: bool = True  # False: neither pooler nor sentence head exist (objective none)
    feed_forward: str = "gelu"  # a row of FEED_FORWARDS

    def __post_init__(self):
        check_ranges(self)
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"--num-heads {self.num_heads} does not divide --hidden-size {self.hidden_size}"
            )
        # No flag sets these: they come from a config.json.
        ranges = {
            "vocab_size": integer(1, 10_000_000),
            "type_vocab_size": WIDTH,
            "initializer_range": SMALL,
            "layer_norm_eps": SMALL,
        }
        for name, allowed in ranges.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} {getattr(self, name)}: must be {allowed}")
        if self.feed_forward not in FEED_FORWARDS:
            known = ", ".join(FEED_FORWARDS)
            raise UserError(f"feed_forward {self.feed_forward}: must be one of {known}")
        share(self.sharing, self.num_layers)
        read_additions(self.per_layer)

    @property
    def has_map(self) -> bool:
        """Whether there is a map E -> H behind the embeddings."""
        return self.square_map or self.embedding_size != self.hidden_size

    @property
    def plan(self) -> Plan:
        """The (attention, feed-forward) block of each layer."""
        return share(self.sharing, self.num_layers)

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Distinct attention and feed-forward blocks."""
        attention, ffn = zip(*self.plan, strict=True)
        return len({*attention}), len({*ffn})

    @property
    def lora_rank(self) -> int:
        """R of --per-layer lora:R; 0 without."""
        return read_additions(self.per_layer).get("lora", 0)

    def has_per_layer(self, place: str) -> bool:
        """Whether --per-layer puts something at this place of every layer."""
        return any(place in ADDITIONS[word].places for word in read_additions(self.per_layer))

    def at_depth(self, num_layers: int) -> "ModelConfig":
        """The same parameters, run as another number of layers.

        Raises UserError if that many layers would not use each block.
        """
        if num_layers == self.num_layers:
            return self
        where = f"{num_layers} layers of --num-layers {self.num_layers}: "
        try:
            sharing = resize(self.sharing, num_layers)
            config = replace(self, num_layers=num_layers, sharing=sharing)
        except UserError as error:
            raise UserError(f"{where}{error}") from None
        if config.num_blocks != self.num_blocks:
            raise UserError(
                f"{where}--sharing {self.sharing} uses other blocks there; allowed: depths that "
                "use the same ones"
            )
        if self.per_layer != "none" and find_layers(self.plan, config.plan) is None:
            raise UserError(
                f"{where}--sharing {self.sharing} runs them in another order there, so what layers "
                f"have of their own (--per-layer {self.per_layer}) has no place"
            )
        return config

    def running_layers(self, num_layers: int) -> list[int]:
        """Which layers' own parameters (--per-layer) are used in a run of `num_layers` of them."""
        return find_layers(self.plan, self.at_depth(num_layers).plan) or []


def reshape(size: ModelConfig, **changes) -> ModelConfig:
    """`size` with what was typed; the number of layers is that of a --sharing that says it."""
    layers = count_named_layers(changes.get("sharing", size.sharing))
    config = replace(size, **({} if layers is None else {"num_layers": layers}) | changes)
    for word in read_additions(config.per_layer):
        if ADDITIONS[word].begins_loops and not find_loops(config.plan):
            raise UserError(
                f"--per-layer {config.per_layer}: {word} needs layers that run again; with "
                f"--sharing {config.sharing} there are none"
            )
    return config


def _size(
    hidden: int, layers: int, heads: int, *, embedding: int = 128, dropout: float = 0.1, **others
) -> ModelConfig:
    return ModelConfig(
        embedding_size=embedding,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        ffn_size=4 * hidden,
        dropout=dropout,
        **others,
    )


# Table 1. Heads are the released models'; BERT-xlarge, never released, has the paper's H / 64.
# Dropout is the paper's: none for xxlarge. albert-tiny is ours, for demonstrations on a CPU.
SIZES: dict[str, ModelConfig] = {
    "albert-tiny": _size(hidden=128, layers=4, heads=4, embedding=64),
    "albert-base": _size(hidden=768, layers=12, heads=12),
    "albert-large": _size(hidden=1024, layers=24, heads=16),
    "albert-xlarge": _size(hidden=2048, layers=24, heads=16),
    "albert-xxlarge": _size(hidden=4096, layers=12, heads=64, dropout=0.0),
    "bert-base": _size(hidden=768, layers=12, heads=12, embedding=768, sharing="none"),
    "bert-large": _size(hidden=1024, layers=24, heads=16, embedding=1024, sharing="none"),
    "bert-xlarge": _size(hidden=2048, layers=24, heads=32, embedding=2048, sharing="none"),
}


def count_flops(config: ModelConfig, *, tokens: int, squared_lengths: int, masked: int) -> int:
    """Floating-point operations of one forward and backward pass, for model FLOP/s utilisation.

    Matrix products only: two operations for a multiplication with its addition, times three (the
    forward pass, the gradient of the input, the gradient of the weight). Recomputation by
    activation checkpointing and the pooler (once a sequence) are not counted. Every layer counts
    for every token, as is customary, although the last layer is computed for its output positions
    only (model/encoder.py).

    tokens: real tokens N; squared_lengths: sum over sequences of length ** 2; masked: positions P.
    """
    v = config.vocab_size
    e = config.embedding_size
    h = config.hidden_size
    projection = e * h if config.has_map else 0
    per_layer = 0
    for part in list_projections(config.feed_forward).values():
        width_in, width_out = (getattr(config, name) for name in part.widths)
        per_layer += width_in * width_out + config.lora_rank * (width_in + width_out)
    per_token = projection + config.num_layers * per_layer
    scores_and_mix = config.num_layers * 2 * h
    return 6 * (tokens * per_token + squared_lengths * scores_and_mix + masked * (h * e + e * v))


# Scores over the vocabulary and their gradients exist for as many masked positions as fit.
MAX_SCORE_BYTES = 3 << 29
# Half of what the divergence from a teacher adds to a score: five numbers in fp32, in the backward
# pass of its logsumexp.
DIVERGENCE_BYTES = 10
# On a CPU: scores of 4 bytes that are worked on together, half of a core's second-level cache.
CACHED_SCORES = 1 << 18


def count_score_rows(vocab_size: int, width: int) -> int:
    """Masked positions whose scores of `width` bytes exist at once: 13,421 for 30,000 pieces, 2."""
    return max(1, MAX_SCORE_BYTES // (2 * width * vocab_size))
