"""Attention inside each sequence of a concatenation, in the form that is fastest on each device.

Shapes: B sequences, N tokens, R output positions, T longest sequence, n heads, D head width.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from albert_ds.model.draws import Draws, mix
from albert_ds.model.dropout import draw_dropped, drop_at, drop_rows
from albert_ds.model.even_shapes import is_shape_bound, round_width

APART = 0x5851F42D4C957F2D  # what the heads add to a seed


class VarlenAttention(nn.Module):
    """Scaled dot-product attention inside each sequence of a concatenation.

    CUDA in half precision: flash attention over the concatenation. CUDA in fp32, which only
    comparisons need: products over a padded copy, because torch's own kernel for fp32 sums products
    of TF32 parts (an H100's gradient norm was off by 1.6e-6). CPU: one call a sequence, so
    that there too only real tokens are computed; in bf16 a padded copy.
    """

    rank: int = 0  # among tensor-parallel peers, each of which has the next heads

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = dropout

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_ends: Tensor,
        kv_ends: Tensor,
        max_seqlen: int,
        draws: Draws | None = None,
    ) -> Tensor:
        """Attend: q [R, n, D] to k, v [N, n, D]; returns [R, n, D].

        q_ends and kv_ends, int32 [B + 1], are the bounds of the sequences in q and in k and v.
        draws: of the queries; flash attention draws from torch's generator instead.
        """
        dropout = self.dropout if self.training else 0.0
        if q.is_cuda and q.dtype != torch.float32:
            # The operator inside torch.nn.attention.varlen, which fixes its dropout at 0. Jagged
            # tensors give it dropout too, at 10 ms of Python a layer (H200; the kernels take 0.3).
            ends = (q_ends, kv_ends, max_seqlen, max_seqlen)
            is_causal = returns_mask = False
            attend = torch.ops.aten._flash_attention_forward
            return attend(q, k, v, *ends, dropout, is_causal, returns_mask)[0]
        drops = None
        if dropout:
            draws = draws or Draws.anew(q_ends, len(q))
            drops = ShareDropout(draws, dropout, q.size(1), self.rank * q.size(1))
        if q.is_cuda:
            return attend_padded(q, k, v, q_ends, kv_ends, (max_seqlen, max_seqlen), drops)
        attend = attend_rounded if is_shape_bound(q) else attend_each
        return attend(q, k, v, q_ends, kv_ends, drops)


class ShareDropout:
    """Dropout of the shares that attention gives to keys, for some heads of every sequence.

    Each (sequence, head) draws by itself, so neither a layout of sequences nor of heads changes it.
    """

    def __init__(self, draws: Draws, probability: float, heads: int, first: int):
        self.draws, self.probability, self.heads, self.first = draws, probability, heads, first

    def part(self, begin: int, end: int) -> "ShareDropout":
        """Of the sequences from `begin` to `end` alone."""
        ends = self.draws.ends[begin : end + 1]
        draws = replace(self.draws, seeds=self.draws.seeds[ends[0] : ends[-1]], ends=ends - ends[0])
        return ShareDropout(draws, self.probability, self.heads, self.first)

    def of_one(self, shares: Tensor, keys: np.ndarray) -> Tensor:
        """[1, n, R, T] of a sequence, by the keys of its heads."""
        count = shares[0, 0].numel()
        places = draw_dropped(keys, [count] * self.heads, self.probability)
        for head, each in enumerate(places):
            each += head * count
        return drop_at(shares, places, self.probability)

    def keys(self) -> np.ndarray:
        """On the host: uint64 [B, n]."""
        heads = np.arange(self.first, self.first + self.heads, dtype=np.uint64)
        return mix(self.draws.keys()[:, None] + heads)

    def of_padded(self, shares: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """[B, n, R, T], padded. slots: of each query in [B, R]; lengths: of the keys, [B]."""
        rows, width = shares.shape[2:]
        if shares.is_cuda:
            seeds = self.draws.seeds.new_zeros(len(shares) * rows)
            seeds = seeds.index_copy(0, slots, self.draws.seeds).view(-1, 1, rows)
            head = torch.arange(self.first, self.first + self.heads, device=seeds.device)
            seeds = (seeds + head[:, None] * APART).flatten()
            number = self.draws.number()
            kept = drop_rows(shares.flatten(0, 2), self.probability, seeds, number)
            return kept.view(shares.shape)
        pairs = zip(self.draws.ends.diff().tolist(), lengths.tolist(), strict=True)
        areas = [pair for pair in pairs for _ in range(self.heads)]
        counts = [queries * length for queries, length in areas]
        places = draw_dropped(self.keys().reshape(-1), counts, self.probability)
        for number, (each, (_, length)) in enumerate(zip(places, areas, strict=True)):
            if length < width:  # over what is padded after each query
                each += each // length * (width - length)
            each += number * rows * width
        return drop_at(shares, places, self.probability)


def attend_each(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, kv_ends: Tensor, drops: ShareDropout | None
) -> Tensor:
    """Attention one sequence at a time. Reads the lengths: on CUDA that would synchronise."""
    heads_first = (
        x.transpose(0, 1).unsqueeze(0).split(ends.diff().tolist(), dim=2)
        for x, ends in ((q, q_ends), (k, kv_ends), (v, kv_ends))
    )
    each = zip(*heads_first, strict=True)
    if drops is None:
        attended = [F.scaled_dot_product_attention(*qkv) for qkv in each]  # [1, n, length, D]
    else:  # torch computes the same on a CPU, but its dropout is slow there (model/dropout.py).
        attended = [
            attend_plainly(*qkv, drop=lambda shares, keys=keys: drops.of_one(shares, keys))
            for qkv, keys in zip(each, drops.keys(), strict=True)
        ]
    return torch.cat(attended, dim=2).squeeze(0).transpose(0, 1)


def attend_rounded(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, kv_ends: Tensor, drops: ShareDropout | None
) -> Tensor:
    """Attention over padded copies of round widths, in bf16 on a CPU.

    With matrix units these products cost little even for the padding, and only round widths keep
    their kernels (`model/even_shapes.py`). Torch's own bf16 kernel takes four times as long
    backwards. Short sequences at the end, as a bucket has them, are narrower copies of their own.
    """
    lengths = kv_ends.diff()
    number = len(lengths)
    cut = int((2 * lengths > lengths.max()).nonzero().max()) + 1
    if cut == number:
        widths = round_width(q_ends), round_width(kv_ends)
        return attend_padded(q, k, v, q_ends, kv_ends, widths, drops)
    cuts = (int(ends[cut]) for ends in (q_ends, kv_ends, kv_ends))
    # Not by slices, each of which would add its gradient to one of all rows.
    halves = (x.split([at, len(x) - at]) for x, at in zip((q, k, v), cuts, strict=True))
    attended = []
    for each, (begin, end) in zip(
        zip(*halves, strict=True), ((0, cut), (cut, number)), strict=True
    ):
        if not len(each[0]):  # only empty sequences, or none that is read
            continue
        of_q = q_ends[begin : end + 1] - q_ends[begin]
        of_kv = of_q if kv_ends is q_ends else kv_ends[begin : end + 1] - kv_ends[begin]
        widths = round_width(of_q), round_width(of_kv)
        drop = drops and drops.part(begin, end)
        attended.append(attend_padded(*each, of_q, of_kv, widths, drop))
    return torch.cat(attended)


def attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] = lambda shares: shares,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v where attn_mask, bool, is true: [B, n, R, D] and [B, n, T, D]."""
    scores = q * q.size(-1) ** -0.5 @ k.mT
    if attn_mask is not None:  # added, because a sum costs nothing backwards
        scores += torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    return drop(torch.softmax(scores, dim=-1)) @ v


def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    kv_ends: Tensor,
    widths: tuple[int, int],
    drops: ShareDropout | None = None,
) -> Tensor:
    """Attention over copies [B, width] with their padding masked; does not synchronise the device.

    widths: of q, and of k and v.
    """
    queries = PaddedIndex(q_ends, len(q), q.size(1), widths[0])
    is_all = kv_ends is q_ends and widths[0] == widths[1]
    keys = queries if is_all else PaddedIndex(kv_ends, len(k), k.size(1), widths[1])
    lengths = kv_ends.diff().long()
    real = torch.arange(widths[1], device=kv_ends.device) < lengths[:, None]
    mask = real[:, None, None]  # [B, 1, 1, width]

    def drop(shares: Tensor) -> Tensor:
        if drops is None:
            return shares
        return drops.of_padded(shares, find_slots(q_ends, len(q), widths[0]), lengths)

    return queries.unpad(attend_plainly(queries.pad(q), keys.pad(k), keys.pad(v), mask, drop))


class PaddedIndex:
    """Maps the vectors of a concatenation [N, n, D] to slots of a padded copy [B, n, width, D]."""

    def __init__(self, ends: Tensor, tokens: int, heads: int, width: int):
        """ends: int32 [B + 1]. Does not synchronise the device."""
        self.shape = (len(ends) - 1, heads, width)
        head = torch.arange(heads, device=ends.device) * width
        sequence = find_sequences(ends, tokens) * (heads - 1) * width
        slots = find_slots(ends, tokens, width) + sequence
        self.slots = (slots[:, None] + head).flatten()  # of each vector, in the padded copy
        nothing = self.slots.new_full((math.prod(self.shape),), len(self.slots))
        vectors = torch.arange(len(self.slots), device=ends.device)
        self.vectors = nothing.index_copy(0, self.slots, vectors)  # in each slot

    def pad(self, x: Tensor) -> Tensor:
        """[N, n, D] -> [B, n, width, D], zeros between."""
        return _Gather.apply(x.flatten(0, 1), self.vectors, self.slots).unflatten(0, self.shape)

    def unpad(self, x: Tensor) -> Tensor:
        """[B, n, width, D] -> [N, n, D]."""
        heads = (-1, self.shape[1])
        return _Gather.apply(x.flatten(0, 2), self.slots, self.vectors).unflatten(0, heads)


class _Gather(torch.autograd.Function):
    """Rows of x by index, one after the last row for zeros; backwards the inverse, not a sum."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return gather(x, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather(gradient, *ctx.saved_tensors), None, None


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [M, D] by index, int64; M stands for a row of zeros."""
    return torch.cat([x, x.new_zeros(1, x.size(1))]).index_select(0, index)


def find_sequences(ends: Tensor, tokens: int) -> Tensor:
    """The sequence that each of N tokens belongs to, int64 [N]. Does not synchronise the device."""
    token = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, token, right=True) - 1


def find_slots(ends: Tensor, tokens: int, width: int) -> Tensor:
    """The index of each of N tokens in a flattened [B, width], int64 [N]."""
    sequence = find_sequences(ends, tokens)
    token = torch.arange(tokens, device=ends.device)
    return sequence * width + token - ends.long().index_select(0, sequence)
