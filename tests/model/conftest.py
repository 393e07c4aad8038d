"""A random micro-batch, and Hugging Face's ALBERT on the padded form of it as the reference."""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from albert_ds.interop.hugging_face import name_pairs, to_hf
from albert_ds.model.config import ModelConfig


def build_config(**changes) -> ModelConfig:
    """A model of a few thousand parameters in which no two sizes are equal."""
    sizes = dict(embedding_size=16, hidden_size=32, num_layers=4, num_heads=2, ffn_size=48)
    limits = dict(vocab_size=101, max_position_embeddings=40, dropout=0.0)
    return ModelConfig(**{**sizes, **limits, **changes})


def build_batch(lengths, *, masked=9, vocab_size=101, seed=0) -> dict:
    """Sequences of these lengths end to end, of every id but <pad>, whose row HF never trains."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, size):
        return torch.randint(low, high, (size,), generator=generator)

    total = sum(lengths)
    return {
        "input_ids": draw(1, vocab_size, total),
        "token_type_ids": torch.cat([(torch.arange(n) > n // 2).long() for n in lengths]),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "max_seqlen": max(lengths),
        "masked_positions": torch.randperm(total, generator=generator)[:masked].sort().values,
        "masked_labels": draw(0, vocab_size, masked),
        "pair_labels": draw(0, 2, len(lengths)),
    }


def run_reference(config: ModelConfig, state: dict, batch: dict) -> dict:
    """Hugging Face's logits [N, V] and [B, 2], hidden states [N, H], loss sums and gradients.

    The gradients come under our names, summed over the copies of what Hugging Face cannot share.
    """
    from transformers import AlbertConfig, AlbertForPreTraining

    hf_config, hf_state = to_hf(config, state)
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob")
    model = AlbertForPreTraining(AlbertConfig(**hf_config | dict.fromkeys(dropouts, 0.0)))
    missing, unexpected = model.load_state_dict(hf_state, strict=False)
    assert not unexpected
    assert set(missing) == {"predictions.decoder.weight", "predictions.decoder.bias"}  # tied

    lengths = batch["cu_seqlens"].diff().tolist()

    def pad(x, value):
        return pad_sequence(x.split(lengths), batch_first=True, padding_value=value)

    labels = torch.full_like(batch["input_ids"], -100)
    labels[batch["masked_positions"]] = batch["masked_labels"]
    real = pad(torch.ones_like(labels), 0)
    out = model.train()(
        input_ids=pad(batch["input_ids"], 0),
        token_type_ids=pad(batch["token_type_ids"], 0),
        attention_mask=real,
        output_hidden_states=True,
    )
    words = out.prediction_logits
    mlm = F.cross_entropy(words.flatten(0, 1), pad(labels, -100).flatten(), reduction="sum")
    pair = F.cross_entropy(out.sop_logits, batch["pair_labels"], reduction="sum")
    (mlm + pair).backward()
    theirs, gradients = {n: p.grad for n, p in model.named_parameters()}, {}
    for our_name, their_name in name_pairs(config):
        gradients[our_name] = gradients.get(our_name, 0) + theirs[their_name]
    return {
        "word_logits": words[real.bool()],
        "pair_logits": out.sop_logits,
        "hidden_states": [x[real.bool()] for x in out.hidden_states],
        "mlm_loss_sum": mlm,
        "pair_loss_sum": pair,
        "gradients": gradients,
    }
