"""The shape of a model, and the paper's Table 1 as one table (sections 3.1, 3.2).

Letters used in all model files: B sequences, N tokens of a micro-batch (its sequences end to end),
P masked positions, T longest sequence a model can take, V vocabulary, E embedding size, H hidden
size, F feed-forward size, L layers, n heads, D = H / n head width.
"""

from dataclasses import dataclass

from albert_ds.cli import Number, as_flag, check_ranges, flag
from albert_ds.errors import UserError

SHAPE = "the model"
BY_SIZE = "that of --model"
WIDTH = Number(low=1, high=1 << 20, whole=True)
DROPOUT = Number(low=0, below=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that fixes the parameters and the function they compute.

    Raises UserError, naming the flag as it is typed, for a shape that no model can have.
    """

    vocab_size: int = flag(
        "V, pieces of the vocabulary; the shards decide it",
        default=30_000,
        shown_default="that of the shards",
        type=Number(low=1, high=10_000_000, whole=True),
        metavar="PIECES",
        group=SHAPE,
    )
    # A map E -> H exists only where E != H.
    embedding_size: int = flag(
        "E, width of the embeddings",
        type=WIDTH,
        metavar="UNITS",
        shown_default=BY_SIZE,
        group=SHAPE,
    )
    hidden_size: int = flag(
        "H, width of the layers", type=WIDTH, metavar="UNITS", shown_default=BY_SIZE, group=SHAPE
    )
    num_layers: int = flag(
        "L, layers",
        type=Number(low=1, high=10_000, whole=True),
        metavar="LAYERS",
        shown_default=BY_SIZE,
        group=SHAPE,
    )
    # The release's count, which is not H / 64 for xlarge.
    num_heads: int = flag(
        "attention heads; must divide --hidden-size",
        type=WIDTH,
        metavar="HEADS",
        shown_default=BY_SIZE,
        group=SHAPE,
    )
    ffn_size: int = flag(
        "inner width of the feed-forward layer; 4 x --hidden-size where only that is typed",
        type=WIDTH,
        metavar="UNITS",
        shown_default=BY_SIZE,
        group=SHAPE,
    )
    max_position_embeddings: int = flag(
        "longest sequence that the model can take",
        default=512,
        shown_default=BY_SIZE,
        type=Number(low=1, high=1 << 20, whole=True),
        metavar="TOKENS",
        group=SHAPE,
    )
    type_vocab_size: int = 2  # segments A and B
    dropout: float = flag(
        "probability of dropout on embeddings, attention and both sublayers' outputs",
        shown_default="0 for albert-xxlarge, 0.1 for the others",
        type=DROPOUT,
        metavar="P",
        group=SHAPE,
    )
    sharing: str = flag(
        "parameters that layers share: all | attention | ffn | none | groups:N",
        default="all",
        shown_default="all; none for BERT",
        metavar="HOW",
        group=SHAPE,
    )
    initializer_range: float = 0.02  # standard deviation of the truncated normal
    layer_norm_eps: float = 1e-12  # the release's
    pair_head: bool = True  # False: neither pooler nor sentence head exist (objective none)

    def __post_init__(self):
        check_ranges(self)
        if self.type_vocab_size not in WIDTH:
            raise UserError(f"--type-vocab-size {self.type_vocab_size}: must be {WIDTH}")
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"--num-heads {self.num_heads} does not divide --hidden-size {self.hidden_size}"
            )
        above = Number(above=0, high=1)
        for name in ("initializer_range", "layer_norm_eps"):
            if getattr(self, name) not in above:
                raise UserError(f"{as_flag(name)} {getattr(self, name)}: must be {above}")
        share(self.sharing, self.num_layers)


def share(sharing: str, num_layers: int) -> list[tuple[int, int]]:
    """The attention and the feed-forward block of each layer (section 3.1, Table 4).

    Returns one (attention index, ffn index) a layer; equal indices mean the same parameters.
    Raises UserError for an unknown word, and for groups of unequal size.
    """
    shared, own = [0] * num_layers, list(range(num_layers))
    kind, _, count = sharing.partition(":")
    if kind == "groups" and count.isdecimal() and int(count) > 0:
        if num_layers % int(count):
            raise UserError(
                f"--sharing {sharing}: {count} does not divide --num-layers {num_layers}"
            )
        groups = [layer * int(count) // num_layers for layer in own]
        return list(zip(groups, groups, strict=True))
    match sharing:
        case "all":
            return list(zip(shared, shared, strict=True))
        case "attention":
            return list(zip(shared, own, strict=True))
        case "ffn":
            return list(zip(own, shared, strict=True))
        case "none":
            return list(zip(own, own, strict=True))
    raise UserError(f"--sharing {sharing}: must be all, attention, ffn, none or groups:N")


def _albert(hidden_size: int, num_layers: int, num_heads: int, dropout: float = 0.1) -> ModelConfig:
    return ModelConfig(
        embedding_size=128,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        ffn_size=4 * hidden_size,
        dropout=dropout,
    )


def _bert(hidden_size: int, num_layers: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        embedding_size=hidden_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        ffn_size=4 * hidden_size,
        dropout=0.1,
        sharing="none",
    )


# Table 1. Heads are the released models'; BERT-xlarge, never released, has the paper's H / 64.
# Dropout is the paper's: none for xxlarge. albert-tiny is ours, for demonstrations on a CPU.
SIZES: dict[str, ModelConfig] = {
    "albert-tiny": ModelConfig(
        embedding_size=64, hidden_size=128, num_layers=4, num_heads=4, ffn_size=512, dropout=0.1
    ),
    "albert-base": _albert(hidden_size=768, num_layers=12, num_heads=12),
    "albert-large": _albert(hidden_size=1024, num_layers=24, num_heads=16),
    "albert-xlarge": _albert(hidden_size=2048, num_layers=24, num_heads=16),
    "albert-xxlarge": _albert(hidden_size=4096, num_layers=12, num_heads=64, dropout=0.0),
    "bert-base": _bert(hidden_size=768, num_layers=12, num_heads=12),
    "bert-large": _bert(hidden_size=1024, num_layers=24, num_heads=16),
    "bert-xlarge": _bert(hidden_size=2048, num_layers=24, num_heads=32),
}


def count_params(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; the values sum to those of AlbertForPretraining.

    `embeddings`, `attention`, `ffn` and `pooler` together are what the paper's tables count.
    """
    v, e, h, f = config.vocab_size, config.embedding_size, config.hidden_size, config.ffn_size
    plan = share(config.sharing, config.num_layers)
    num_attention, num_ffn = (len(set(indices)) for indices in zip(*plan, strict=True))
    projection = (e + 1) * h if e != h else 0
    tables = (v + config.type_vocab_size + config.max_position_embeddings) * e
    return {
        "embeddings": tables + 2 * e + projection,
        "attention": num_attention * (4 * (h + 1) * h + 2 * h),
        "ffn": num_ffn * ((h + 1) * f + (f + 1) * h + 2 * h),
        "pooler": (h + 1) * h if config.pair_head else 0,
        "mlm_head": (h + 1) * e + 2 * e + v,  # its V x E table is the embeddings'
        "pair_head": (h + 1) * 2 if config.pair_head else 0,
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
    v, e, h, f = config.vocab_size, config.embedding_size, config.hidden_size, config.ffn_size
    projection = e * h if e != h else 0
    per_token = projection + config.num_layers * (4 * h * h + 2 * h * f)
    scores_and_mix = config.num_layers * 2 * h
    return 6 * (tokens * per_token + squared_lengths * scores_and_mix + masked * (h * e + e * v))


# Scores over the vocabulary exist for as many masked positions at once as fit in MAX_SCORE_BYTES.
# One takes the most in the backward pass: softmax's output and two gradients, in fp32.
MAX_SCORE_BYTES = 3 << 29
SCORE_BYTES = 12


def count_score_rows(vocab_size: int) -> int:
    """Masked positions whose scores exist at once: 4,473 for 30,000 pieces."""
    return max(1, MAX_SCORE_BYTES // (SCORE_BYTES * vocab_size))


CHOICES = 4  # options of a question
NUM_TOP = 5  # starts, and ends of each, that the conditional head proposes (release: 5 x 5)
KINDS = ("classification", "regression", "choice", "span", "conditional_span")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """The head of a task."""

    kind: str  # one of KINDS
    num_labels: int  # outputs of its linear map
    dropout: float = 0.1  # before it; of the span head none
    labels: tuple[str, ...] = ()  # names of the classes

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(f"kind {self.kind}: must be one of {', '.join(KINDS)}")
        for name, allowed in (("num_labels", WIDTH), ("dropout", DROPOUT)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} {getattr(self, name)}: must be {allowed}")

    @property
    def reads_pooled(self) -> bool:
        """Whether it reads the pooled [CLS]; else it reads every token."""
        return self.kind in ("classification", "regression", "choice")
