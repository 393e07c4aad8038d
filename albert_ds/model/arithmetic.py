"""How large a model is and how much it computes, as arithmetic on its config (Table 1)."""

from albert_ds.model.config import ModelConfig, share


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

    Two a multiplication with its addition, three such passes (forward, gradient of the input,
    gradient of the weight), matrix products only; what activation checkpointing computes again is
    not counted, and neither is the pooler (once a sequence). Every layer counts for every token, as
    is the custom, though of the last one only what is read is computed (model/encoder.py).

    tokens: real tokens N; squared_lengths: sum over sequences of length ** 2; masked: positions P.
    """
    v, e, h, f = config.vocab_size, config.embedding_size, config.hidden_size, config.ffn_size
    projection = e * h if e != h else 0
    per_token = projection + config.num_layers * (4 * h * h + 2 * h * f)
    scores_and_mix = config.num_layers * 2 * h
    return 6 * (tokens * per_token + squared_lengths * scores_and_mix + masked * (h * e + e * v))
