"""The reference for every layout: one process, float64, Hugging Face's model, LAMB written again.

It shares no code with the product.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AlbertConfig, AlbertForPreTraining

from tests.batches import IGNORED, pad

# Product name -> Hugging Face name.
NAMES = {
    "albert.embeddings.word": "albert.embeddings.word_embeddings",
    "albert.embeddings.token_type": "albert.embeddings.token_type_embeddings",
    "albert.embeddings.position": "albert.embeddings.position_embeddings",
    "albert.embeddings.layer_norm": "albert.embeddings.LayerNorm",
    "albert.embeddings.projection": "albert.encoder.embedding_hidden_mapping_in",
    "albert.pooler": "albert.pooler",
    "mlm_head.transform": "predictions.dense",
    "mlm_head.layer_norm": "predictions.LayerNorm",
    "mlm_head": "predictions",  # its bias
    "pair_head": "sop_classifier.classifier",
}
# Within a block of ours, and a layer of theirs.
BLOCK = {
    "attention": {
        "self_attention.query": "attention.query",
        "self_attention.key": "attention.key",
        "self_attention.value": "attention.value",
        "self_attention.output": "attention.dense",
        "layer_norm": "attention.LayerNorm",
    },
    "ffn": {
        "feed_forward.up": "ffn",
        "feed_forward.down": "ffn_output",
        "layer_norm": "full_layer_layer_norm",
    },
}
PROJECTIONS = tuple(f"{name}.weight" for name in ("query", "key", "value", "output", "up", "down"))
RESULTS = {"attention": "attention.dense", "ffn": "ffn_output"}
# The (attention, feed-forward) block of each of four layers, written by hand.
PLANS = {
    "all": [(0, 0), (0, 0), (0, 0), (0, 0)],
    "attention": [(0, 0), (0, 1), (0, 2), (0, 3)],
    "ffn": [(0, 0), (1, 0), (2, 0), (3, 0)],
    "none": [(0, 0), (1, 1), (2, 2), (3, 3)],
    "groups:1": [(0, 0), (0, 0), (0, 0), (0, 0)],
    "groups:2": [(0, 0), (0, 0), (1, 1), (1, 1)],
    "groups:4": [(0, 0), (1, 1), (2, 2), (3, 3)],
    "cycle:2": [(0, 0), (1, 1), (0, 0), (1, 1)],
    "cycle:3": [(0, 0), (1, 1), (2, 2), (0, 0)],
    "cycle-rev:2": [(0, 0), (1, 1), (1, 1), (0, 0)],
    "cycle-rev:3": [(0, 0), (1, 1), (2, 2), (2, 2)],
    "cycle-rev:4": [(0, 0), (1, 1), (2, 2), (3, 3)],
    "loop:1,1x2,1": [(0, 0), (1, 1), (1, 1), (2, 2)],
    "loop:0,1x3,1": [(0, 0), (0, 0), (0, 0), (1, 1)],
    "pattern:0,0,1,2": [(0, 0), (0, 0), (1, 1), (2, 2)],
    "pattern:1,1,0,0/0,1,1,2": [(1, 0), (1, 1), (0, 1), (0, 2)],
    "pattern:0,0,1,0/0,1,1,2": [(0, 0), (0, 1), (1, 1), (0, 2)],
}
# The layers that run at another depth, by hand.
RUNNING = {
    ("all", 2): [0, 1],
    ("all", 3): [0, 1, 2],
    ("groups:2", 2): [0, 2],
    ("loop:1,1x2,1", 3): [0, 1, 3],
}


def plan_of(sharing: str, layers: int) -> tuple[list[int], list[int]]:
    """The attention and the feed-forward block of each layer."""
    own = list(range(layers))
    one = [0] * layers
    words = {"all": (one, one), "attention": (one, own), "ffn": (own, one), "none": (own, own)}
    if sharing in words:
        return words[sharing]
    assert layers == 4, "written by hand for four layers"
    attention, ffn = zip(*PLANS[sharing], strict=True)
    return list(attention), list(ffn)


class Adapted(nn.Module):
    """(W x + b + B A x) s, of which A, B and s may be missing."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.first = self.second = self.scale = None

    def forward(self, x):
        y = self.linear(x)
        if self.first is not None:
            y = y + x @ self.first.T @ self.second.T
        return y if self.scale is None else y * self.scale


def build_reference(config, weights: dict[str, torch.Tensor]):
    """Hugging Face's model in float64 with the product's weights, and where they are in it."""
    model = AlbertForPreTraining(
        AlbertConfig(
            vocab_size=config.vocab_size,
            embedding_size=config.embedding_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_hidden_groups=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.ffn_size,
            hidden_act="gelu_new",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            max_position_embeddings=config.max_position_embeddings,
            attn_implementation="eager",
        )
    ).double()
    layers = [group.albert_layers[0] for group in model.albert.encoder.albert_layer_groups]
    parameters = {}
    for our_name, hf_name in NAMES.items():
        for leaf, parameter in model.get_submodule(hf_name).named_parameters(recurse=False):
            parameters[f"{our_name}.{leaf}"] = parameter
    plan = dict(zip(BLOCK, plan_of(config.sharing, config.num_layers), strict=True))
    for kind, blocks in plan.items():
        for number, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
            for our_name, hf_name in BLOCK[kind].items():
                prefix = f"albert.encoder.{kind}.{block}.{our_name}"
                if our_name == "layer_norm" and "norm" in config.per_layer.split(","):
                    prefix = f"albert.encoder.own.{number}.{kind}.layer_norm"
                else:  # tie it to the first layer that uses the block
                    shared = layers[blocks.index(block)].get_submodule(hf_name)
                    layer.set_submodule(hf_name, shared)
                for leaf, parameter in layer.get_submodule(hf_name).named_parameters():
                    parameters[f"{prefix}.{leaf}"] = parameter
    embedded = model.albert.encoder.embedding_hidden_mapping_in
    embedded.register_forward_hook(lambda module, given, out: setattr(module, "kept", out))
    parameters |= add_own(layers, {n: w for n, w in weights.items() if ".own." in n}, embedded)
    parameters = {name: parameters[name] for name in weights}
    if "albert.embeddings.projection.weight" not in weights:  # an embedding as wide as the layers
        nn.init.eye_(embedded.weight)
        nn.init.zeros_(embedded.bias)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model.train(), parameters


def add_own(layers: list[nn.Module], weights: dict[str, torch.Tensor], embedded) -> dict:
    """Give the layers what they have of their own but norms; returns it by the product's names.

    `embedded.kept` is the embedding's output.
    """
    added = {}
    for name, tensor in weights.items():
        number, kind, place, leaf = name.removeprefix("albert.encoder.own.").split(".")
        if place == "layer_norm":
            continue
        layer = layers[int(number)]
        parameter = nn.Parameter(tensor.double().clone())
        added[name] = parameter
        if place in ("input", "embedded"):

            def shift(module, given, p=parameter, is_factor=leaf == "gain"):
                return given[0] + (p * embedded.kept if is_factor else p), *given[1:]

            layer.register_forward_pre_hook(shift)
            continue
        paths = {our_name.rpartition(".")[2]: hf_name for our_name, hf_name in BLOCK[kind].items()}
        path = RESULTS[kind] if place == "result" else paths[place]
        module = layer.get_submodule(path)
        if not isinstance(module, Adapted):
            module = Adapted(module)
            layer.set_submodule(path, module)
        setattr(module, leaf, parameter)
    return added


def run_layers(model, groups: list[nn.Module], layers: list[int]) -> None:
    """Let the model run these of its layers only."""
    model.config.num_hidden_layers = model.config.num_hidden_groups = len(layers)
    model.albert.encoder.albert_layer_groups = nn.ModuleList(groups[layer] for layer in layers)


def reference_loss(
    model,
    samples: list[dict],
    *,
    has_pairs: bool,
    exits: dict[int, float] | None = None,
    z_loss: float = 0.0,
    teacher=None,
    teacher_weight: float = 0.0,
) -> torch.Tensor:
    """Mean MLM loss over all samples, plus the mean loss of the labelled pairs.

    `exits`: layers before the last one that add their MLM loss, times this weight. `z_loss`: weight
    of the mean of log(Z)^2. `teacher`: Hugging Face's model too, whose scores are goals.
    """
    batch = pad(samples)
    labels, order = batch.pop("labels"), batch.pop("sentence_order_label")
    outputs = []  # of the layers that run; what Hugging Face records are those of its first call
    groups = model.albert.encoder.albert_layer_groups
    hooks = [g.register_forward_hook(lambda _, given, out: outputs.append(out)) for g in groups]
    out = model(**batch)
    for hook in hooks:
        hook.remove()
    loss = F.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten())
    z = out.prediction_logits[labels != IGNORED].exp().sum(1)
    loss = loss + z_loss * z.log().square().mean()
    if teacher is not None:
        with torch.no_grad():
            teacher_scores = teacher(**batch).prediction_logits[labels != IGNORED]
        scores = out.prediction_logits[labels != IGNORED]
        loss = loss + teacher_weight * mean_divergence(scores, teacher_scores)
    for layer, weight in (exits or {}).items():
        if layer < len(outputs):
            logits = model.predictions(outputs[layer - 1])
            loss = loss + weight * F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    if has_pairs:
        loss = loss + F.cross_entropy(out.sop_logits, order, ignore_index=IGNORED)
    return loss


def mean_divergence(scores: torch.Tensor, goals: torch.Tensor, top: int = 32) -> torch.Tensor:
    """Of scores, row by row and by probabilities: KL over the `top` likeliest and all others."""
    total = scores.new_zeros(())
    for own, their in zip(scores.softmax(1), goals.softmax(1), strict=True):
        order = their.argsort(descending=True)
        first = order[:top]
        others = order[top:]
        p = torch.cat([own[first], own[others].sum().view(1)])
        q = torch.cat([their[first], their[others].sum().view(1)])
        total = total + (q * (q / p).log()).sum()
    return total / len(scores)


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
    muon: bool = False,
    depths: list[int] | None = None,
    exits: dict[int, float] | None = None,
    z_loss: float = 0.0,
    teacher=None,
    teacher_weight: float = 0.0,
) -> Reference:
    """Train over `batches`; without a pair head among `weights` there is no pair loss.

    `muon`: not LAMB but Muon for the matrices of the blocks and AdamW, at half the rate, for the
    others. `depths`: layers of each step; what a layer that does not run has alone is not touched.
    """
    model, parameters = build_reference(config, weights)
    groups = list(model.albert.encoder.albert_layer_groups)
    depth = config.num_layers
    first = {n: torch.zeros_like(p) for n, p in parameters.items()}
    second = {n: torch.zeros_like(p) for n, p in parameters.items()}
    losses = []
    norms = []
    gradients = {}
    for step, (samples, rate) in enumerate(zip(batches, rates, strict=True)):
        if depths and depths[step] != depth:
            depth = depths[step]
            is_whole = depth == config.num_layers
            running = [*range(depth)] if is_whole else RUNNING[config.sharing, depth]
            run_layers(model, groups, running)
        has_pairs = "pair_head.weight" in weights
        more = {"exits": exits, "z_loss": z_loss}
        more |= {"teacher": teacher, "teacher_weight": teacher_weight}
        loss = reference_loss(model, samples, has_pairs=has_pairs, **more)
        for parameter in (*parameters.values(), *model.parameters()):
            parameter.grad = None
        loss.backward()
        norms_of = [p.grad.norm() for p in parameters.values() if p.grad is not None]
        norm = torch.stack(norms_of).norm()
        scale = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
        with torch.no_grad():
            for name, p in parameters.items():
                if p.grad is None:
                    gradients[name] = torch.zeros_like(p)
                    continue
                g = gradients[name] = p.grad * scale
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g * g
                if muon:
                    update_by_muon(name, p, g, first[name], second[name], rate, len(norms) + 1)
                    continue
                update = first[name] / (second[name].sqrt() + 1e-6)
                if "layer_norm" in name or name.endswith(("bias", "scale", "gain")):
                    p -= rate * update
                    continue
                update = update + weight_decay * p
                ratio = p.norm() / update.norm() if p.norm() > 0 and update.norm() > 0 else 1.0
                p -= rate * ratio * update
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Reference(
        weights={name: parameter.detach() for name, parameter in parameters.items()},
        gradients=gradients,
        losses=losses,
        norms=norms,
    )


def update_by_muon(name, p, g, first, second, rate, step, decay=0.01) -> None:
    """Update p in place; its moments hold g already. Muon's momentum decays by 0.9 here."""
    if name.startswith("albert.encoder") and name.endswith(PROJECTIONS) and ".own." not in name:
        direction = newton_schulz(0.9 * first + 0.1 * g)
        p -= rate * (decay * p + 0.2 * max(p.shape) ** 0.5 * direction)
        return
    if "layer_norm" in name or name.endswith(("bias", "scale", "gain")):
        decay = 0.0
    mean, square = first / (1 - 0.9**step), second / (1 - 0.999**step)
    p -= 0.5 * rate * (mean / (square.sqrt() + 1e-6) + decay * p)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """By the singular values alone: the iteration leaves both orthogonal factors as they are.

    As torch.optim.Muon, it divides by 1e-7 at least, so a smaller matrix has a smaller result.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm().clamp(min=1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return left * values @ right


def update_error(
    trained: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    initial: dict[str, torch.Tensor],
) -> float:
    """Worst ||p - p_ref|| / ||p_ref - p_init|| over tensors.

    The key bias is left out: its true gradient is 0, so whatever normalises it moves it by noise.
    All factors (scale) count as one tensor: one may move by no more than the rounding of its 1.
    """
    squares: dict[str, tuple[float, float]] = {}
    for name, goal in reference.items():
        if name.endswith("key.bias"):
            continue
        tensor = "scale" if name.endswith(".scale") else name
        off, moved = squares.get(tensor, (0.0, 0.0))
        squares[tensor] = (
            off + float((trained[name].double() - goal).square().sum()),
            moved + float((goal - initial[name].double()).square().sum()),
        )
    return max((off / moved) ** 0.5 for off, moved in squares.values())
