"""The MLM head by chunks against one cross entropy over everything; the sentence head's labels."""

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from albert_ds.model import albert, cross_entropy
from albert_ds.model.albert import MlmHead
from albert_ds.model.config import count_score_rows
from albert_ds.model.cross_entropy import IGNORED, CachedCrossEntropy
from tests.model.conftest import build_config

ROWS, V, E = 50, 101, 16  # chunks of more rows than E, since the embedding is E x V, transposed


class ScoreMemory(TorchDispatchMode):
    """The most bytes that scores and their gradients took at one time."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.dim() == 2 and x.size(1) == V and len(x) > E:
                storage = x.untyped_storage()
                self.alive[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, sum(n for ref, n in self.alive.items() if not ref.expired()))
        return result


def make_head(config):
    torch.manual_seed(0)
    head = MlmHead(config)
    torch.nn.init.normal_(head.bias)
    word = torch.randn(V, E, requires_grad=True)
    return head, word, torch.randn(ROWS, 32, requires_grad=True), torch.randint(V, (ROWS,))


def score(head, word, hidden, labels):
    loss, correct = head(hidden, labels, word)
    return loss, correct, torch.autograd.grad(loss, [*head.parameters(), word, hidden])


@pytest.mark.parametrize("rows", [7, 25, 50, 4096])
def test_chunks_do_not_change_the_sums(monkeypatch, rows):
    head, word, hidden, labels = make_head(build_config())
    labels[:4] = head.logits(hidden, word)[:4].argmax(-1)
    logits = F.linear(head.project(hidden), word, head.bias)
    expected = F.cross_entropy(logits, labels, reduction="sum")
    gradients = torch.autograd.grad(expected, [*head.parameters(), word, hidden])
    monkeypatch.setattr(albert, "count_score_rows", lambda vocab_size, width: rows)
    loss, correct, chunk_gradients = score(head, word, hidden, labels)
    torch.testing.assert_close(loss, expected)
    assert correct == (logits.argmax(-1) == labels).sum() >= 4
    torch.testing.assert_close(chunk_gradients, gradients, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(head(hidden, labels, word), (loss, correct))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_never_take_more_than_the_bound(monkeypatch, dtype):
    head, word, hidden, labels = make_head(build_config())
    head.to(dtype)
    bound = 20 * V * 2 * dtype.itemsize
    monkeypatch.setattr("albert_ds.model.config.MAX_SCORE_BYTES", bound)
    monkeypatch.setattr("albert_ds.model.cross_entropy.CACHED_SCORES", V)  # a row in fp32
    kept = []

    def keep(x):
        kept.append(x.shape)
        return x

    with ScoreMemory() as memory:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss, _ = head(hidden.to(dtype), labels, word.to(dtype))
        loss.backward()
    assert 0.6 < memory.peak / bound <= 1.15
    assert not [shape for shape in kept if shape[-1:] == (V,) and len(shape) == 2]


def test_the_bound_holds_for_every_vocabulary():
    for vocab_size, width in ((800, 2), (30_000, 2), (30_000, 4), (250_000, 2), (10_000_000, 4)):
        rows = count_score_rows(vocab_size, width)
        assert rows * vocab_size * 2 * width <= 1.5 * 2**30
        assert (rows + 1) * vocab_size * 2 * width > 1.5 * 2**30


@pytest.mark.parametrize("rows", [1, 7, 50, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0, 0.01])
def test_rows_at_a_time_give_torchs_sum_and_gradient(rows, dtype, z_loss, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CACHED_SCORES", rows * V)
    torch.manual_seed(0)
    logits = (20 * torch.randn(ROWS, V)).to(dtype)
    logits[:2, :2] = 200
    logits.requires_grad_()
    labels = torch.randint(V, (ROWS,))
    labels[:9] = logits[:9].argmax(-1)
    labels[1] = 1  # as high as the first, which is the prediction
    labels[[3, 20]] = IGNORED
    loss, correct, *squares = CachedCrossEntropy.apply(logits, labels, z_loss > 0)
    (gradient,) = torch.autograd.grad(0.25 * loss + z_loss * sum(squares), logits)
    expected = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    wanted = logits[labels != IGNORED].float().logsumexp(1).square().sum()
    (reference,) = torch.autograd.grad(0.25 * expected + z_loss * wanted, logits)
    assert correct == (logits.argmax(-1) == labels).sum() >= 7
    torch.testing.assert_close([loss, *squares], [expected, wanted] if z_loss else [expected])
    torch.testing.assert_close(gradient, reference)
    assert not gradient[[3, 20]].any()
