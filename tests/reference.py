"""One process, float64, nothing of the product: Hugging Face's model and LAMB written anew.

What every layout of the product is held against.
"""

import re

import torch
import torch.nn.functional as F
from transformers import AlbertConfig, AlbertForPreTraining

from tests.batches import IGNORED, pad

# Product name -> Hugging Face name, for a model whose layers are in `num_hidden_groups` groups.
NAMES = (
    (r"^albert\.embeddings\.projection\.", "albert.encoder.embedding_hidden_mapping_in."),
    (r"^albert\.embeddings\.layer_norm\.", "albert.embeddings.LayerNorm."),
    (r"^albert\.embeddings\.(word|token_type|position)\.", r"albert.embeddings.\1_embeddings."),
    (
        r"^albert\.encoder\.attention\.(\d+)\.self_attention\.output\.",
        r"albert.encoder.albert_layer_groups.\1.albert_layers.0.attention.dense.",
    ),
    (
        r"^albert\.encoder\.attention\.(\d+)\.self_attention\.",
        r"albert.encoder.albert_layer_groups.\1.albert_layers.0.attention.",
    ),
    (
        r"^albert\.encoder\.attention\.(\d+)\.layer_norm\.",
        r"albert.encoder.albert_layer_groups.\1.albert_layers.0.attention.LayerNorm.",
    ),
    (
        r"^albert\.encoder\.ffn\.(\d+)\.feed_forward\.up\.",
        r"albert.encoder.albert_layer_groups.\1.albert_layers.0.ffn.",
    ),
    (
        r"^albert\.encoder\.ffn\.(\d+)\.feed_forward\.down\.",
        r"albert.encoder.albert_layer_groups.\1.albert_layers.0.ffn_output.",
    ),
    (
        r"^albert\.encoder\.ffn\.(\d+)\.layer_norm\.",
        r"albert.encoder.albert_layer_groups.\1.albert_layers.0.full_layer_layer_norm.",
    ),
    (r"^mlm_head\.transform\.", "predictions.dense."),
    (r"^mlm_head\.layer_norm\.", "predictions.LayerNorm."),
    (r"^mlm_head\.bias$", "predictions.bias"),
    (r"^pair_head\.", "sop_classifier.classifier."),
)


def reference_name(name: str) -> str:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def build_reference(config, weights: dict[str, torch.Tensor]) -> AlbertForPreTraining:
    """Hugging Face's model in float64 with the product's weights (all, none or groups:N)."""
    groups = 1 + max(int(m[1]) for n in weights if (m := re.search(r"encoder\.ffn\.(\d+)", n)))
    model = AlbertForPreTraining(
        AlbertConfig(
            vocab_size=config.vocab_size,
            embedding_size=config.embedding_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_hidden_groups=groups,
            num_attention_heads=config.num_heads,
            intermediate_size=config.ffn_size,
            hidden_act="gelu_new",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            max_position_embeddings=config.max_position_embeddings,
            attn_implementation="eager",
        )
    )
    renamed = {reference_name(name): tensor for name, tensor in weights.items()}
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    assert not unexpected, unexpected
    assert all("decoder" in name for name in missing), missing
    return model.double().train()


def reference_losses(model, samples: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean MLM and mean sentence-order loss over all samples."""
    batch = pad(samples)
    labels, order = batch.pop("labels"), batch.pop("sentence_order_label")
    out = model(**batch)
    mlm = F.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten())
    return mlm, F.cross_entropy(out.sop_logits, order, ignore_index=IGNORED)


def reference_training(
    config,
    weights: dict[str, torch.Tensor],
    batches: list[list[dict]],
    *,
    rates: list[float],
    clip: float | None = 1.0,
    weight_decay: float = 0.01,
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Train over `batches`; returns weights by product name, losses and gradient norms."""
    model = build_reference(config, weights)
    parameters = dict(model.named_parameters())
    first = {n: torch.zeros_like(p) for n, p in parameters.items()}
    second = {n: torch.zeros_like(p) for n, p in parameters.items()}
    losses, norms = [], []
    for samples, rate in zip(batches, rates, strict=True):
        loss = sum(reference_losses(model, samples))
        model.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
        scale = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
        with torch.no_grad():
            for name, p in parameters.items():
                g = p.grad * scale
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g * g
                update = first[name] / (second[name].sqrt() + 1e-6)
                if "LayerNorm" in name or "layer_norm" in name or name.endswith("bias"):
                    p -= rate * update
                    continue
                update = update + weight_decay * p
                ratio = p.norm() / update.norm() if p.norm() > 0 and update.norm() > 0 else 1.0
                p -= rate * ratio * update
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    trained = {name: parameters[reference_name(name)].detach() for name in weights}
    return trained, losses, norms


def update_error(
    trained: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    initial: dict[str, torch.Tensor],
) -> float:
    """Worst ||p - p_ref|| / ||p_ref - p_init|| over tensors.

    The key bias is left out: its true gradient is 0, so whatever normalises it moves it by noise.
    """
    worst = 0.0
    for name, goal in reference.items():
        if name.endswith("key.bias"):
            continue
        moved = (goal - initial[name].double()).norm()
        worst = max(worst, float((trained[name].double() - goal).norm() / moved))
    return worst
