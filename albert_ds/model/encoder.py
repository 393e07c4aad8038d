"""The encoder: L post-LN layers over blocks that layers may share (section 3.1).

A micro-batch is its sequences end to end, so nothing is padded. Only `model/attention.py` uses the
ends of the sequences. The last layer is computed only for the output positions: in pretraining the
masked tokens and each [CLS], a seventh of all tokens. Nothing here knows of ranks: the number of
heads comes from view(N, -1, D), because under tensor parallelism a rank holds some of the heads.
Shapes: B sequences, N tokens, R output positions, H hidden, F feed-forward, n heads, D head width,
L layers.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from albert_ds.base.plugin import Table
from albert_ds.model.attention import VarlenAttention
from albert_ds.model.config import ModelConfig
from albert_ds.model.draws import Draws
from albert_ds.model.fused import (
    Linear,
    is_faster_in_triton,
    linear,
    linear_gelu,
    linear_heads,
    share_gradients,
)
from albert_ds.model.per_layer import ResidualNorm, build_per_layer


class SelfAttention(nn.Module):
    """Multi-head attention with four projections H -> H, each with a bias."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.hidden_size
        self.head_dim = width // config.num_heads
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.core = VarlenAttention(config.dropout)
        self.output = Linear(width, width)

    def join_projections(self) -> tuple[Tensor, Tensor]:
        """Query, key and value as one projection: weight [3H, H] and bias [3H]."""
        three = (self.query, self.key, self.value)
        return torch.cat([p.weight for p in three]), torch.cat([p.bias for p in three])

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        output_positions: Tensor | None = None,
        own: nn.ModuleDict | None = None,
        joined: tuple[Tensor, Tensor] | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        """Mix the tokens of each sequence: [N, H] -> [R, H], without the residual.

        joined: of `join_projections`, which layers that share the block make once; None: made here.
        """
        weight, bias = joined or self.join_projections()
        if output_positions is None:
            needed, q_ends = x, cu_seqlens
            q, k, v = linear(x, weight, bias).chunk(3, dim=1)
        else:
            needed = x.index_select(0, output_positions)  # [R, H]
            q_ends = torch.searchsorted(output_positions, cu_seqlens, out_int32=True)
            width = len(bias) // 3
            q = linear(needed, weight[:width], bias[:width])
            k, v = linear(x, weight[width:], bias[width:]).chunk(2, dim=1)
        qkv = (
            add_own(own, name, y, projected)
            for name, y, projected in (("query", needed, q), ("key", x, k), ("value", x, v))
        )
        mixed = self.attend(*qkv, q_ends, cu_seqlens, max_seqlen, draws)
        return add_own(own, "output", mixed, self.output(mixed))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *ends) -> Tensor:
        """The heads' attention, side by side: [R, H] to [N, H] twice, `ends` of the core."""
        heads = (x.unflatten(1, (-1, self.head_dim)) for x in (q, k, v))  # [R, n, D], [N, n, D]
        return self.core(*heads, *ends).flatten(1)


def add_own(own: nn.ModuleDict | None, name: str, x: Tensor, projected: Tensor) -> Tensor:
    """The projection `name` of x, with what the layer adds to it."""
    return projected + own[name](x) if own is not None and name in own else projected


class FeedForward(nn.Module):
    """H -> F -> H with the tanh form of GELU."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = Linear(config.hidden_size, config.ffn_size)
        self.down = Linear(config.ffn_size, config.hidden_size)

    def forward(self, x: Tensor, own: nn.ModuleDict | None = None) -> Tensor:
        """Transform each token separately: [N, H] -> [N, H], without the residual."""
        inner = F.gelu(add_own(own, "up", x, self.up(x)), approximate="tanh")  # [N, F]
        return add_own(own, "down", inner, self.down(inner))


# Form of the feed-forward part -> its module.
BUILD = Table(Callable) | {"gelu": FeedForward}


class AttentionBlock(nn.Module):
    """LN(x + dropout(attention(x))): the part that --sharing attention shares.

    `own` is what the layer that uses the block has of its own in it (`model/per_layer.py`).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = SelfAttention(config)
        if not config.has_per_layer("attention.layer_norm"):
            self.layer_norm = ResidualNorm(config)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        output_positions: Tensor | None = None,
        own: nn.ModuleDict | None = None,
        joined: tuple[Tensor, Tensor] | None = None,
        sums: Mapping | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        """[N, H] -> [R, H]; [N, H] without output positions. With `sums` (`share_gradients`) fused.

        draws: of the rows that come out, at the first of two sites.
        """
        heads = self.self_attention
        after = draws and draws.at(draws.site + 1)
        if sums is not None and output_positions is None:
            *qkv, x = linear_heads(x, *joined or heads.join_projections(), sums)
            mixed = heads.attend(*qkv, cu_seqlens, cu_seqlens, max_seqlen, draws)
            return self.layer_norm.after(x, mixed, heads.output, after, sums)
        mixed = heads(x, cu_seqlens, max_seqlen, output_positions, own, joined, draws)
        needed = x if output_positions is None else x.index_select(0, output_positions)  # [R, H]
        return end_block(self, needed, mixed, own, after)

    def tensors(self, joined: tuple[Tensor, Tensor]) -> list[tuple[Tensor, ...]]:
        """Groups of `share_gradients`."""
        last = self.self_attention.output
        norm = self.layer_norm
        return [joined, (last.weight, norm.weight, norm.bias, last.bias)]


class FeedForwardBlock(nn.Module):
    """LN(x + dropout(ffn(x))): the part that --sharing ffn shares."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.feed_forward = BUILD[config.feed_forward](config)
        if not config.has_per_layer("ffn.layer_norm"):
            self.layer_norm = ResidualNorm(config)

    def forward(
        self,
        x: Tensor,
        own: nn.ModuleDict | None = None,
        sums: Mapping | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        """[N, H] -> [N, H]. With `sums` (of `share_gradients`) fused."""
        if sums is not None:
            inner, x = linear_gelu(x, self.feed_forward.up, sums)
            return self.layer_norm.after(x, inner, self.feed_forward.down, draws, sums)
        return end_block(self, x, self.feed_forward(x, own), own, draws)

    def tensors(self) -> list[tuple[Tensor, ...]]:
        """Groups of `share_gradients`."""
        up = self.feed_forward.up
        last = self.feed_forward.down
        norm = self.layer_norm
        return [(up.weight, up.bias), (last.weight, norm.weight, norm.bias, last.bias)]


def end_block(
    block: AttentionBlock | FeedForwardBlock,
    x: Tensor,
    added: Tensor,
    own: nn.ModuleDict | None,
    draws: Draws | None,
) -> Tensor:
    """LN(x + dropout(added)), with the layer's own factor and norm if it has them."""
    if own is None:
        return block.layer_norm(x, added, draws)
    added = own["result"](added) if "result" in own else added
    return (own["layer_norm"] if "layer_norm" in own else block.layer_norm)(x, added, draws)


class Encoder(nn.Module):
    """L layers over as many distinct blocks as the sharing needs.

    activation_checkpointing is what the backward pass computes again instead of keeping: `none`,
    `attention` (the attention blocks) or `block` (whole layers; only their inputs are kept).
    eight_bits: in training the blocks' products are in eight bits (`fp8.py`), but for those of the
    output positions.
    """

    eight_bits = False

    attention: Any  # nn.ModuleList of AttentionBlock
    ffn: Any  # of FeedForwardBlock
    own: Any  # of PerLayer

    def __init__(self, config: ModelConfig, activation_checkpointing: str):
        super().__init__()
        assert activation_checkpointing in ("none", "attention", "block")
        self.activation_checkpointing = activation_checkpointing
        self.config = config
        self.set_depth(config.num_layers)
        num_attention, num_ffn = config.num_blocks
        self.attention = nn.ModuleList(AttentionBlock(config) for _ in range(num_attention))
        self.ffn = nn.ModuleList(FeedForwardBlock(config) for _ in range(num_ffn))
        self.own = build_per_layer(config)

    def set_depth(self, num_layers: int) -> None:
        """Run this many layers from now on; UserError if they would leave a block out."""
        self.plan = self.config.at_depth(num_layers).plan
        self.layers = self.config.running_layers(num_layers)  # of the whole model, which run

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        output_positions: Tensor | None = None,
        draws: Draws | None = None,
    ) -> list[Tensor]:
        """Encode [N, H]; returns the L + 1 states [N, H]: each layer's input, then the output.

        output_positions: int64 [R], ascending: the tokens whose last state is needed. The last
        layer is computed for these alone, and its state is [R, H]. None: all.
        """
        joined = [block.self_attention.join_projections() for block in self.attention]
        x, sums = self._share_gradients(x, joined)
        states = [x]
        embedded = x
        for layer, (a, f) in enumerate(self.plan):
            last_positions = output_positions if layer + 1 == len(self.plan) else None
            if draws is not None and last_positions is not None:
                draws = draws.of(last_positions)
            first, second = (draws and draws.at(3 * layer + part) for part in (1, 3))
            attention = partial(self.attention[a], joined=joined[a], sums=sums, draws=first)
            is_exact = self.eight_bits and last_positions is not None
            ffn = partial(self.ffn[f], sums=None if is_exact else sums, draws=second)
            if len(self.own):
                own = self.own[self.layers[layer]]
                if "input" in own.layer:
                    x = states[-1] = own.layer["input"](x)
                if "embedded" in own.layer:
                    x = own.layer["embedded"](x, embedded)
                attention = partial(attention, own=own.attention)
                ffn = partial(ffn, own=own.ffn)
            x = self._run_layer(attention, ffn, x, cu_seqlens, max_seqlen, last_positions)
            states.append(x)
        return states

    def _share_gradients(
        self, x: Tensor, joined: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Mapping | None]:
        """`share_gradients` of the blocks that several layers share; None if none runs fused."""
        eight_bits = self.eight_bits and self.training
        is_plain = isinstance(self.ffn[0].feed_forward, FeedForward)
        assert is_plain or not eight_bits, "products in eight bits are of the plain form alone"
        is_fused = is_plain and not len(self.own) and is_faster_in_triton(x)
        if not eight_bits and not is_fused:
            return x, None
        groups: tuple[list[tuple[Tensor, ...]], list] = [], []  # shared, alone
        attention, ffn = (Counter(numbers) for numbers in zip(*self.plan, strict=True))
        for number, block in enumerate(self.attention):
            if not isinstance(block.self_attention.output, nn.Linear):
                return x, None  # ranks hold its parts
            groups[attention[number] <= 1].extend(block.tensors(joined[number]))
        for number, block in enumerate(self.ffn):
            groups[ffn[number] <= 1].extend(block.tensors())
        return share_gradients(x, *groups, eight_bits=eight_bits)

    def _run_layer(self, attention, ffn, x: Tensor, *tokens) -> Tensor:
        # Never the reentrant form: it fires the gradient hook of a shared weight once per layer,
        # and ZeRO counts on one.
        match self.activation_checkpointing if self.training else "none":
            case "block":
                return checkpoint(lambda y: ffn(attention(y, *tokens)), x, use_reentrant=False)
            case "attention":
                return ffn(checkpoint(attention, x, *tokens, use_reentrant=False))
        return ffn(attention(x, *tokens))
