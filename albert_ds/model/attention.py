"""Attention inside each sequence of a concatenation, in the form that is fastest on each device.

Shapes: B sequences, N tokens, R output positions, T longest sequence, n heads, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from albert_ds.model.dropout import drop


class VarlenAttention(nn.Module):
    """Scaled dot-product attention inside each sequence of a concatenation.

    CUDA in half precision: flash attention over the concatenation. CUDA in fp32: a padded copy,
    because that kernel takes no fp32, which only comparisons need. CPU: one call a sequence, so
    that there too only real tokens are computed.
    """

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = dropout

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, kv_ends: Tensor, max_seqlen: int
    ) -> Tensor:
        """Attend: q [R, n, D] to k, v [N, n, D]; returns [R, n, D].

        q_ends and kv_ends, int32 [B + 1], are the bounds of the sequences in q and in k and v.
        """
        dropout = self.dropout if self.training else 0.0
        if not q.is_cuda:
            return attend_each(q, k, v, q_ends, kv_ends, dropout)
        if q.dtype == torch.float32:
            return attend_padded(q, k, v, q_ends, kv_ends, max_seqlen, dropout)
        # The operator inside torch.nn.attention.varlen, which fixes its dropout at 0. Jagged
        # tensors give it dropout too, at 10 ms of Python a layer (H200; the kernels take 0.3 ms).
        ends = (q_ends, kv_ends, max_seqlen, max_seqlen)
        is_causal = returns_mask = False
        attend = torch.ops.aten._flash_attention_forward
        return attend(q, k, v, *ends, dropout, is_causal, returns_mask)[0]


@torch.compiler.disable  # the number of calls depends on the data
def attend_each(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, kv_ends: Tensor, dropout: float
) -> Tensor:
    """Attention one sequence at a time, in fp32 where the model is in half precision.

    Torch's bf16 kernel for CPUs takes two to three times as long backwards as its fp32 kernel, even
    where bf16 products are ten times as fast. Reads the lengths: on CUDA that would synchronise.
    """
    dtype = q.dtype
    if dtype.itemsize == 2:
        q, k, v = q.float(), k.float(), v.float()
    heads_first = (
        x.transpose(0, 1).unsqueeze(0).split(ends.diff().tolist(), dim=2)
        for x, ends in ((q, q_ends), (k, kv_ends), (v, kv_ends))
    )
    attended = [
        _attend_one(*qkv, dropout)  # [1, n, length, D]
        for qkv in zip(*heads_first, strict=True)
    ]
    return torch.cat(attended, dim=2).squeeze(0).transpose(0, 1).to(dtype)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    if not dropout:
        return F.scaled_dot_product_attention(q, k, v)
    # torch computes the same on a CPU, but its dropout is slow there (model/dropout.py).
    probabilities = torch.softmax(q * q.size(-1) ** -0.5 @ k.mT, dim=-1)
    return drop(probabilities, dropout) @ v


def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    kv_ends: Tensor,
    max_seqlen: int,
    dropout: float,
) -> Tensor:
    """Attention over a copy [B, T] with its padding masked; does not synchronise the device.

    The memory-efficient kernel would take the concatenation in fp32, but drops other probabilities
    in its backward pass than in its forward pass (seen in PyTorch 2.11).
    """
    num_sequences = len(kv_ends) - 1

    def pad(x: Tensor, slots: Tensor) -> Tensor:
        rows = x.new_zeros(num_sequences * max_seqlen, *x.shape[1:]).index_copy(0, slots, x)
        return rows.unflatten(0, (num_sequences, max_seqlen)).transpose(1, 2)  # [B, n, T, D]

    q_slots, kv_slots = (find_slots(y, len(x), max_seqlen) for x, y in ((q, q_ends), (k, kv_ends)))
    real = pad(torch.ones_like(kv_slots, dtype=torch.bool)[:, None, None], kv_slots).mT
    attended = F.scaled_dot_product_attention(
        pad(q, q_slots),
        pad(k, kv_slots),
        pad(v, kv_slots),
        attn_mask=real,  # [B, 1, 1, T]
        dropout_p=dropout,
    )
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, q_slots)


def find_sequences(ends: Tensor, tokens: int) -> Tensor:
    """The sequence that each of N tokens belongs to, int64 [N]. Does not synchronise the device."""
    token = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, token, right=True) - 1


def find_slots(ends: Tensor, tokens: int, width: int) -> Tensor:
    """The index of each of N tokens in a flattened [B, width], int64 [N]."""
    sequence = find_sequences(ends, tokens)
    token = torch.arange(tokens, device=ends.device)
    return sequence * width + token - ends.long().index_select(0, sequence)
