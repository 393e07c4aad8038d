"""The reference for every layout: one process, float64, Hugging Face's model, LAMB written again.

It shares no code with the product.
"""

import re
from dataclasses import dataclass

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
    """Hugging Face's model in float64 with the product's weights, for any sharing."""
    counts = {
        kind: 1 + max(int(m[1]) for n in weights if (m := re.search(rf"{kind}\.(\d+)", n)))
        for kind in ("attention", "ffn")
    }
    model = AlbertForPreTraining(
        AlbertConfig(
            vocab_size=config.vocab_size,
            embedding_size=config.embedding_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_hidden_groups=max(counts.values()),
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
    for kind, modules in TIED_MODULES.items():
        if counts[kind] == 1:
            _tie(model, modules)
    renamed = {reference_name(name): tensor for name, tensor in weights.items()}
    _, unexpected = model.load_state_dict(renamed, strict=False)
    assert not unexpected, unexpected
    left = {name for name, _ in model.named_parameters()} - set(renamed)
    assert all("pooler" in name or "classifier" in name for name in left), left
    return model.double().train()


# Hugging Face cannot share one kind of block alone: its modules in all layers become one.
TIED_MODULES = {"attention": ("attention",), "ffn": ("ffn", "ffn_output", "full_layer_layer_norm")}


def _tie(model: AlbertForPreTraining, modules: tuple[str, ...]) -> None:
    first, *others = (group.albert_layers[0] for group in model.albert.encoder.albert_layer_groups)
    for other in others:
        for name in modules:
            setattr(other, name, getattr(first, name))


def reference_loss(model, samples: list[dict], *, has_pairs: bool) -> torch.Tensor:
    """Mean MLM loss over all samples, plus the mean loss of the labelled pairs."""
    batch = pad(samples)
    labels, order = batch.pop("labels"), batch.pop("sentence_order_label")
    out = model(**batch)
    loss = F.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten())
    if has_pairs:
        loss = loss + F.cross_entropy(out.sop_logits, order, ignore_index=IGNORED)
    return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The results of the reference; float64 tensors by the product's names."""

    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]  # of the last step, clipped
    losses: list[float]
    norms: list[float]  # before clipping


def reference_training(
    config,
    weights: dict[str, torch.Tensor],
    batches: list[list[dict]],
    *,
    rates: list[float],
    clip: float | None = 1.0,
    weight_decay: float = 0.01,
) -> Reference:
    """Train over `batches`; without a pair head among `weights` there is no pair loss."""
    model = build_reference(config, weights)
    reached = {reference_name(name) for name in weights}
    parameters = {n: p for n, p in model.named_parameters() if n in reached}
    first = {n: torch.zeros_like(p) for n, p in parameters.items()}
    second = {n: torch.zeros_like(p) for n, p in parameters.items()}
    losses, norms, gradients = [], [], {}
    for samples, rate in zip(batches, rates, strict=True):
        loss = reference_loss(model, samples, has_pairs="pair_head.weight" in weights)
        model.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
        scale = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
        with torch.no_grad():
            for name, p in parameters.items():
                g = gradients[name] = p.grad * scale
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
    return Reference(
        weights={name: parameters[reference_name(name)].detach() for name in weights},
        gradients={name: gradients[reference_name(name)] for name in weights},
        losses=losses,
        norms=norms,
    )


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
