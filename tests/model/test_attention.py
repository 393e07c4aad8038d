"""Attention inside each sequence, against a dense softmax under a block-diagonal mask."""

import pytest
import torch

from albert_ds.model import attention
from albert_ds.model.attention import ShareDropout, VarlenAttention, attend_each, attend_padded
from albert_ds.model.draws import Draws

LENGTHS = [5, 1, 17, 2, 40]
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make_qkv(dtype=torch.float32, num_heads=3, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    shape = (sum(LENGTHS), num_heads, head_dim)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def attend_dense(q, k, v):
    """All pairs of tokens are scored; those of two sequences are then forbidden."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.size(-1) ** 0.5
    scores = scores.masked_fill(sequence[:, None] != sequence, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def attend_with_gradients(attend, qkv, weigh):
    out = attend(*qkv)
    return out, torch.autograd.grad((out * weigh.to(out)).sum(), qkv)


def assert_equal_to_dense(attend, dtype, device, tolerance):
    weigh = torch.randn(sum(LENGTHS), 3, 8, generator=torch.Generator().manual_seed(1))
    expected, expected_grads = attend_with_gradients(attend_dense, make_qkv(), weigh)
    moved = [x.detach().to(device, dtype).requires_grad_() for x in make_qkv()]
    out, grads = attend_with_gradients(attend, moved, weigh)
    for tensor, reference in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (tensor.float().cpu() - reference).norm() <= tolerance * reference.norm()


def attend_in_fp32_as_on_cuda(q, k, v, q_ends, kv_ends, max_seqlen):
    return attend_padded(q, k, v, q_ends, kv_ends, (max_seqlen, max_seqlen))


def attend_in_16_bits_as_on_cpu(q, k, v, q_ends, kv_ends, max_seqlen):
    widths = max_seqlen, max_seqlen + 24
    return attend_padded(q, k, v, q_ends, kv_ends, widths)


FORMS = [VarlenAttention(dropout=0.0), attend_in_fp32_as_on_cuda, attend_in_16_bits_as_on_cpu]


@pytest.mark.parametrize("attend", FORMS)
def test_each_sequence_attends_to_itself_alone(attend):
    ends = (CU_SEQLENS, CU_SEQLENS, max(LENGTHS))
    assert_equal_to_dense(lambda *qkv: attend(*qkv, *ends), torch.float32, "cpu", 1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_in_16_bits_too(dtype, tolerance):
    ends = (CU_SEQLENS, CU_SEQLENS, max(LENGTHS))
    core = VarlenAttention(dropout=0.0)
    assert_equal_to_dense(lambda *qkv: core(*qkv, *ends), dtype, "cpu", tolerance)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
)
def test_some_queries_get_what_they_get_among_all(device):
    read = torch.tensor([0, 5, 6, 7, 22, 23, 25, 30, 63, 64])  # one sequence's only token, too
    q_ends = torch.tensor([0, 1, 2, 5, 6, 10], dtype=torch.int32)
    ends = (q_ends.to(device), CU_SEQLENS.to(device), max(LENGTHS))
    for core in FORMS:
        qkv = [x.detach().to(device).requires_grad_() for x in make_qkv()]
        weigh = torch.randn(len(read), 3, 8, generator=torch.Generator().manual_seed(1))
        out, grads = attend_with_gradients(
            lambda q, k, v, core=core: core(q[read.to(device)], k, v, *ends), qkv, weigh
        )
        expected, expected_grads = attend_with_gradients(
            lambda *qkv: attend_dense(*qkv)[read], make_qkv(), weigh
        )
        for tensor, reference in zip((out, *grads), (expected, *expected_grads), strict=True):
            torch.testing.assert_close(tensor.cpu(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_falls_on_the_probabilities_and_only_in_training(dtype):
    core = VarlenAttention(dropout=0.25)
    q, k, _ = make_qkv(dtype)
    ends = (CU_SEQLENS, CU_SEQLENS, max(LENGTHS))
    ones = torch.ones_like(q)  # the output is then the sum of the kept probabilities / 0.75
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = torch.stack([core(q, k, ones, *ends) for _ in range(200)]).float()
        kept = core.eval()(q, k, ones, *ends)
    assert drawn.mean().item() == pytest.approx(1, abs=0.02)
    alone = drawn[:, LENGTHS[0]]  # a sequence of one token: one probability
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(alone.unique(), torch.tensor([0, 4 / 3]), rtol=rounding, atol=0)
    assert (alone == 0).float().mean().item() == pytest.approx(0.25, abs=0.06)
    torch.testing.assert_close(kept, torch.ones_like(kept))


def test_empty_sequences_at_the_end_change_nothing():
    q, k, v = make_qkv(torch.bfloat16)
    results = []
    for empty in (0, 2):
        ends = torch.cat([CU_SEQLENS, CU_SEQLENS[-1:].expand(empty)])
        draws = Draws(torch.arange(len(q)), ends)
        results.append(
            attention.attend_rounded(q, k, v, ends, ends, ShareDropout(draws, 0.3, 3, 0))
        )
    assert torch.equal(*results)


@pytest.mark.parametrize("probability", [0, 0.3])
def test_short_sequences_at_the_end_are_a_narrower_copy(probability, monkeypatch):
    ends = torch.tensor([0, 17, 20, 60, 62, 65], dtype=torch.int32)
    q_ends = torch.tensor([0, 4, 5, 12, 13, 15], dtype=torch.int32)
    widths = []

    def watch(*given, whole=attend_padded):
        widths.append(given[5])
        return whole(*given)

    monkeypatch.setattr(attention, "attend_padded", watch)
    draws = Draws(torch.arange(7, 22), q_ends)
    drops = ShareDropout(draws, probability, 3, 0) if probability else None
    read = torch.arange(0, 60, 4)
    weigh = torch.randn(15, 3, 8, generator=torch.Generator().manual_seed(1))
    results = [
        attend_with_gradients(
            lambda q, *kv, form=form: form(q[read], *kv, q_ends, ends, drops),
            make_qkv(torch.float64),
            weigh,
        )
        for form in (attend_each, attention.attend_rounded)
    ]
    (expected, of_expected), (rounded, of_rounded) = results
    assert widths == [(16, 48), (16, 16)]
    for tensor, reference in zip((rounded, *of_rounded), (expected, *of_expected), strict=True):
        torch.testing.assert_close(tensor, reference)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
def test_cuda_is_the_same_function_and_waits_for_nothing(dtype, tolerance):
    core = VarlenAttention(dropout=0.0)
    ends = CU_SEQLENS.cuda()

    def attend(q, k, v):
        torch.cuda.set_sync_debug_mode("error")
        out = core(q, k, v, ends, ends, max(LENGTHS))
        torch.cuda.set_sync_debug_mode("default")
        return out

    assert_equal_to_dense(attend, dtype, "cuda", tolerance)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_dropout_falls_on_the_probabilities(dtype):
    core = VarlenAttention(dropout=0.25)
    ends = (*[CU_SEQLENS.cuda()] * 2, max(LENGTHS))
    q, k, v = (x.detach().to("cuda", dtype).requires_grad_() for x in make_qkv())
    with torch.no_grad():
        ones = torch.ones_like(v)
        drawn = torch.stack([core(q, k, ones, *ends) for _ in range(200)]).float()
    assert drawn.mean().item() == pytest.approx(1, abs=0.02)
    alone = drawn[:, LENGTHS[0]].unique().cpu()
    torch.testing.assert_close(alone, torch.tensor([0, 4 / 3]), rtol=1e-2, atol=0)
    # The output is linear in v, so <gradient of v, v> = <output, gradient of the output> where
    # backward drops the same probabilities.
    out = core(q, k, v, *ends)
    (gradient,) = torch.autograd.grad(out, v, out.detach())
    linear = (gradient.float() * v.float()).sum()
    square = out.float().square().sum()
    assert linear.item() == pytest.approx(square.item(), rel=2e-2)
