"""Distillation: the scores of another model, the teacher, as goals (Hinton et al. 2015).

At a masked position the teacher's TOP likeliest pieces are a class each, and all others together
are one more. The divergence over these classes is exact; the teacher's order of the others is not
learnt.
Shapes: P masked positions, V vocabulary, K = min(TOP, V - 1) pieces.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from albert_ds.model.config import DIVERGENCE_BYTES, count_score_rows
from albert_ds.model.cross_entropy import IGNORED

TOP = 32


class Goals(NamedTuple):
    """What a teacher thinks of P positions."""

    top: Tensor  # int64 [P, K], pieces
    classes: Tensor  # fp32 [P, K + 1]: log probabilities of these and of all others together


class Teacher:
    """A model that only scores, and the weight of its term of the loss.

    It is no module: neither DeepSpeed nor a checkpoint of its student sees its weights, and no
    layout cuts them.
    """

    def __init__(self, model: Any, weight: float):  # AlbertForPretraining, whose file imports this
        self.model = model.eval().requires_grad_(False)
        self.weight = weight

    @torch.no_grad()
    def score(self, masked_positions: Tensor, **tokens) -> Goals:
        """The goals at masked positions int64 [P]; tokens: of `AlbertForPretraining.encode`."""
        states = self.model.encode(masked_positions=masked_positions, **tokens)[0]
        head = self.model.mlm_head
        word = self.model.albert.embeddings.word.weight
        rows = count_score_rows(len(word), states.dtype.itemsize + DIVERGENCE_BYTES)
        parts = [find_goals(head.logits(part, word)) for part in states.split(rows)]
        return Goals(*map(torch.cat, zip(*parts, strict=True)))


def find_goals(scores: Tensor) -> Goals:
    """Goals from a teacher's scores, fp32 [P, V]."""
    top = scores.topk(min(TOP, scores.size(1) - 1)).indices
    return Goals(top, log_classes(scores, top))


def log_classes(scores: Tensor, top: Tensor) -> Tensor:
    """Log probabilities of pieces and of all others together: fp32 [P, V], [P, K] -> [P, K + 1]."""
    others = scores.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([scores.gather(1, top), others], 1).log_softmax(1)


def sum_divergences(scores: Tensor, labels: Tensor, goals: Goals) -> Tensor:
    """Sum over positions of KL(goals || scores), fp32, for scores [P, V].

    labels: int64 [P]; a position of -100 counts in nothing.
    """
    classes = log_classes(scores.float(), goals.top)
    each = F.kl_div(classes, goals.classes, reduction="none", log_target=True).sum(1)
    return torch.where(labels == IGNORED, 0, each).sum()
