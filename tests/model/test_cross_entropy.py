"""The CPU's cross entropy, a few rows at a time, against torch's over everything."""

import pytest
import torch
import torch.nn.functional as F

from albert_ds.model import cross_entropy
from albert_ds.model.cross_entropy import IGNORED, CachedCrossEntropy

ROWS, V = 50, 101


@pytest.mark.parametrize("rows", [1, 7, 50, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_at_a_time_give_torchs_sum_and_gradient(rows, dtype, monkeypatch):
    parts = []
    split = cross_entropy.split_rows
    monkeypatch.setattr(cross_entropy, "CACHED_SCORES", rows * V)
    monkeypatch.setattr(
        cross_entropy, "split_rows", lambda *x: [parts.append(1) or y for y in split(*x)]
    )
    torch.manual_seed(0)
    logits = (20 * torch.randn(ROWS, V)).to(dtype).requires_grad_()
    labels = torch.randint(V, (ROWS,))
    labels[:9] = logits[:9].argmax(-1)
    labels[[3, 20]] = IGNORED
    loss, correct = CachedCrossEntropy.apply(logits, labels)
    (gradient,) = torch.autograd.grad(0.25 * loss, logits)
    expected = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    (reference,) = torch.autograd.grad(0.25 * expected, logits)
    assert len(parts) == 2 * -(-ROWS // rows)  # forward and backward
    assert correct == (logits.argmax(-1) == labels).sum() >= 8
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, reference)
    assert not gradient[[3, 20]].any()


def test_a_negative_label_that_is_not_the_ignored_one_is_no_class():
    labels = torch.zeros(ROWS, dtype=torch.int64)
    labels[7] = -1
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(torch.zeros(ROWS, V), labels, ignore_index=IGNORED)
    with pytest.raises(RuntimeError, match="out of bounds"):
        CachedCrossEntropy.apply(torch.zeros(ROWS, V), labels)
