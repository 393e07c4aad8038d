"""The shape of a model, and the paper's Table 1 as one table (sections 3.1, 3.2).

Letters used in all model files: B sequences, N tokens of a micro-batch (its sequences end to end),
P masked positions, T longest sequence a model can take, V vocabulary, E embedding size, H hidden
size, F feed-forward size, L layers, n heads, D = H / n head width.
"""

from dataclasses import dataclass

from albert_ds.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that fixes the parameters and the function they compute.

    Raises UserError, naming the flag as it is typed, for a shape that no model can have.
    """

    vocab_size: int = 30_000  # V
    embedding_size: int  # E; a map E -> H exists only where E != H
    hidden_size: int  # H
    num_layers: int  # L
    num_heads: int  # n; the release's count, which is not H / 64 for xlarge
    ffn_size: int  # F
    max_position_embeddings: int = 512  # T
    type_vocab_size: int = 2  # segments A and B
    dropout: float  # on embeddings, attention probabilities and both sublayers' outputs
    sharing: str = "all"  # all | attention | ffn | none | groups:N
    initializer_range: float = 0.02  # standard deviation of the truncated normal
    layer_norm_eps: float = 1e-12  # the release's
    pair_head: bool = True  # False: neither pooler nor sentence head exist (objective none)

    def __post_init__(self):
        for name in (
            "vocab_size",
            "embedding_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "ffn_size",
            "max_position_embeddings",
            "type_vocab_size",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{_flag(name)} {getattr(self, name)}: must be at least 1")
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"--num-heads {self.num_heads} does not divide --hidden-size {self.hidden_size}"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout {self.dropout}: must be at least 0 and below 1")
        for name in ("initializer_range", "layer_norm_eps"):
            if not getattr(self, name) > 0:
                raise UserError(f"{_flag(name)} {getattr(self, name)}: must be above 0")
        share(self.sharing, self.num_layers)


def share(sharing: str, num_layers: int) -> list[tuple[int, int]]:
    """Which attention and which feed-forward block each layer uses (section 3.1, Table 4).

    Returns one (attention index, ffn index) a layer; equal indices mean the same parameters.
    Raises UserError for a word that is no way of sharing, and for groups of unequal size.
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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
