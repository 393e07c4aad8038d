"""The modules of what a layer has of its own (`model/additions.py`), and how an export folds them.

Shapes: N tokens, H hidden, R rank.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from albert_ds.errors import UserError
from albert_ds.model.additions import read_additions, widths_of
from albert_ds.model.config import ModelConfig
from albert_ds.model.dropout import Dropout

FULL_NAMES = {  # of the projections within their block
    **{name: f"self_attention.{name}" for name in ("query", "key", "value", "output")},
    **{name: f"feed_forward.{name}" for name in ("up", "down")},
}
LAST = {"attention": "output", "ffn": "down"}  # the projection that a block ends with


class ResidualNorm(nn.LayerNorm):
    """LN(x + dropout(added)): [N, H] and [N, H] -> [N, H]."""

    def __init__(self, config: ModelConfig):
        super().__init__(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, added: Tensor) -> Tensor:  # ty: ignore[incompatible-method-override]
        return super().forward(x + self.dropout(added))


class Scale(nn.Module):
    """x * scale, a number that starts as 1."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Shift(nn.Module):
    """x + bias, a vector [H] that starts as 0."""

    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class LowRank(nn.Module):
    """(x first^T) second^T: [N, in] -> [N, out]; `second` starts as 0 (Hu et al. 2021)."""

    def __init__(self, width_in: int, width_out: int, rank: int):
        super().__init__()
        self.first = nn.Parameter(torch.empty(rank, width_in))
        self.second = nn.Parameter(torch.zeros(width_out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first), self.second)


# Word of --per-layer -> its module, for a place and a value.
BUILD: dict[str, Callable[[ModelConfig, str, int], nn.Module]] = {
    "norm": lambda config, place, value: ResidualNorm(config),
    "scale": lambda config, place, value: Scale(),
    "position": lambda config, place, value: Shift(config.hidden_size),
    "lora": lambda config, place, value: LowRank(*widths_of(config, place), value),
}


class Own(nn.Module):
    """What one layer has of its own: its modules by place."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.layer, self.attention, self.ffn = (nn.ModuleDict() for _ in range(3))
        for addition, value in read_additions(config.per_layer):
            for place in addition.places:
                kind, name = place.split(".")
                part: nn.ModuleDict = getattr(self, kind)
                assert name not in part, f"two additions at {place}"
                part[name] = BUILD[addition.form.partition(":")[0]](config, place, value)


def build_own(config: ModelConfig) -> nn.ModuleList:
    """What each layer has of its own; empty without --per-layer."""
    layers = 0 if config.per_layer == "none" else config.num_layers
    return nn.ModuleList(Own(config) for _ in range(layers))


def fold(config: ModelConfig, state: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A model without additions that computes the same, with one block a layer.

    The factor and the low-rank product go into the projections, a vector on a layer's input into
    the bias of the LayerNorm before it. Raises UserError for an addition that has no such place.
    """
    if config.per_layer == "none":
        return config, state
    encoder = "albert.encoder."
    folded = {name: x for name, x in state.items() if not name.startswith(encoder)}
    for layer, blocks in enumerate(config.plan):
        for kind, block in zip(("attention", "ffn"), blocks, strict=True):
            old, new = f"{encoder}{kind}.{block}.", f"{encoder}{kind}.{layer}."
            folded |= {
                name.replace(old, new): x for name, x in state.items() if name.startswith(old)
            }
    own = [name for name in state if name.startswith(f"{encoder}own.")]
    # A norm takes the place of another one; a factor also multiplies what was added.
    order = ("layer_norm", "input", *FULL_NAMES, "result")
    for name in sorted(
        own, key=lambda name: [*order, name.split(".")[5]].index(name.split(".")[5])
    ):
        layer, kind, place, leaf = name.removeprefix(f"{encoder}own.").split(".")
        block = f"{encoder}{kind}.{layer}."
        match place, leaf:
            case "layer_norm", _:
                folded[f"{block}layer_norm.{leaf}"] = state[name]
            case "result", "scale":
                for part in ("weight", "bias"):
                    target = f"{block}{FULL_NAMES[LAST[kind]]}.{part}"
                    folded[target] = folded[target] * state[name]
            case "input", "bias":
                target = f"{encoder}ffn.{int(layer) - 1}.layer_norm.bias"
                if layer == "0":
                    is_mapped = config.embedding_size != config.hidden_size
                    target = f"albert.embeddings.{'projection' if is_mapped else 'layer_norm'}.bias"
                folded[target] = folded[target] + state[name]
            case _, "first" if place in FULL_NAMES:
                target = f"{block}{FULL_NAMES[place]}.weight"
                second = state[name.removesuffix("first") + "second"]
                folded[target] = folded[target] + second @ state[name]
            case _, "second" if place in FULL_NAMES:
                pass  # with `first`
            case _:
                raise UserError(
                    f"--per-layer {config.per_layer}: {name} has no place in a model whose layers "
                    "have blocks alone, so it cannot be exported"
                )
    return replace(config, sharing="none", per_layer="none"), folded
