"""The sum of cross entropies over a large vocabulary, in fp32, and how many predictions are right.

Over a vocabulary torch's own passes over the scores in fp32 about ten times. On a CPU it takes
twice as long as `CachedCrossEntropy`; on CUDA a kernel reads them once, in their own type.
Shapes: P positions, V vocabulary or classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from albert_ds.model.config import CACHED_SCORES
from albert_ds.model.device import can_use_triton

IGNORED = -100  # the label that counts in no loss and no accuracy


def sum_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of cross entropies (fp32) and number correct (int64) for logits [P, V], labels [P].

    The label -100 counts in neither.
    """
    scores = logits.float()
    loss = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
    return loss, (scores.detach().argmax(-1) == labels).sum()


def sum_over_vocabulary(logits: Tensor, labels: Tensor, z_loss: bool) -> tuple[Tensor, ...]:
    """`sum_cross_entropy` of many classes, in the form that is fastest on the device.

    With `z_loss` also the sum of log(Z)^2 (fp32), where softmax divides by Z.
    """
    if logits.is_cpu:
        return CachedCrossEntropy.apply(logits, labels, z_loss)
    if not can_use_triton(logits):
        scores = logits.float()
        sums = sum_cross_entropy(scores, labels)
        return (*sums, sum_squares(scores.logsumexp(1), labels)) if z_loss else sums
    from albert_ds.model import kernels  # imports Triton

    return kernels.CrossEntropy.apply(logits, labels, IGNORED, z_loss)


def sum_squares(totals: Tensor, labels: Tensor) -> Tensor:
    """The sum of log(Z)^2 from each row's log(Z)."""
    return torch.where(labels == IGNORED, 0, totals).square().sum()


class CachedCrossEntropy(torch.autograd.Function):
    """`sum_over_vocabulary` of rows that fit into a core's cache together.

    Keeps the logits in their own type, and of fp32 one number a row.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, z_loss: bool):
        losses, corrects, totals = [], [], []
        for scores, label in split_rows(logits, labels):
            scores = scores.to(torch.float32, copy=True)
            highest = scores.amax(dim=1)  # a fifth of the time that torch takes with its place
            chosen = scores.gather(1, label.where(label != IGNORED, 0).unsqueeze(1)).squeeze(1)
            correct = (chosen == highest) & (label != IGNORED)
            # Of equal scores the first is the prediction.
            correct[correct.clone()] = scores[correct].argmax(dim=1) == label[correct]
            total = scores.sub_(highest.unsqueeze(1)).exp_().sum(dim=1).log_() + highest
            losses.append(torch.where(label == IGNORED, 0, total - chosen))
            corrects.append(correct)
            totals.append(total)
        correct = torch.cat(corrects).sum()
        total = torch.cat(totals)
        ctx.save_for_backward(logits, labels, total)
        ctx.mark_non_differentiable(correct)
        sums = torch.cat(losses).sum(), correct
        return (*sums, sum_squares(total, labels)) if z_loss else sums

    @staticmethod
    def backward(ctx, gradient: Tensor, _, of_squares: Tensor | None = None):  # ty: ignore[incompatible-method-override]
        """For each row: softmax - one-hot, and softmax 2 log(Z), times the sums' gradients."""
        logits, labels, totals = ctx.saved_tensors
        result = torch.empty_like(logits)
        for scores, label, total, part in split_rows(logits, labels, totals, result):
            probabilities = scores.to(torch.float32, copy=True).sub_(total.unsqueeze(1)).exp_()
            more = None
            if of_squares is not None:
                tilt = torch.where(label == IGNORED, 0, 2 * of_squares * total)
                more = probabilities * tilt.unsqueeze(1)
            one = torch.ones_like(probabilities[:, :1])
            probabilities.scatter_add_(1, label.where(label != IGNORED, 0).unsqueeze(1), -one)
            weight = torch.where(label == IGNORED, 0, gradient)
            probabilities.mul_(weight.unsqueeze(1))
            part.copy_(probabilities if more is None else probabilities.add_(more))
        return result, None, None


def split_rows(logits: Tensor, *others: Tensor):
    """Rows of the logits, and of the others, in parts of at most CACHED_SCORES scores."""
    rows = max(1, CACHED_SCORES // logits.size(1))
    return zip(*(x.split(rows) for x in (logits, *others)), strict=True)
