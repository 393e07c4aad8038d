"""The heads of fine-tuning (section 4.9): a class, a score, an option, tags, or a span.

The heads for classes, scores, options and tags, and that of SQuAD 1.1, are BERT's: one linear map
of the pooled [CLS] or of every token. That of SQuAD 2.0 is the release's: the end is scored given
the start, and a classifier decides whether there is an answer; all three are trained together.
Losses are SUMS in fp32 over the examples of a micro-batch, as in pretraining.
Shapes: B sequences, N tokens, T longest sequence, H hidden, C classes, K = NUM_TOP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from albert_ds.base.errors import UserError
from albert_ds.base.plugin import Table
from albert_ds.model.albert import AlbertModel, init_weights
from albert_ds.model.attention import find_sequences, find_slots
from albert_ds.model.config import DROPOUT, WIDTH, ModelConfig

HIDDEN = -1e30  # score of a position where no span may begin or end; finite, to avoid NaN
CHOICES = 4  # options of a question
NUM_TOP = 5  # starts, and ends of each, that the conditional head proposes (release: 5 x 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """The head of a task."""

    kind: str  # one of HEADS
    num_labels: int  # outputs of its linear map
    dropout: float = 0.1  # before it; of the span head none
    labels: tuple[str, ...] = ()  # names of the classes

    def __post_init__(self):
        if self.kind not in HEADS:
            raise UserError(f"kind {self.kind}: must be one of {', '.join(HEADS)}")
        for name, allowed in (("num_labels", WIDTH), ("dropout", DROPOUT)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} {getattr(self, name)}: must be {allowed}")

    @property
    def row(self) -> "Head":
        return HEADS[self.kind]


def sum_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropies of classes [B], given logits [B, C]."""
    return F.cross_entropy(logits, labels, reduction="sum")


def sum_squares(logits: Tensor, labels: Tensor) -> Tensor:
    """Squared errors of scores [B], given logits [B, 1]."""
    return F.mse_loss(logits.squeeze(1), labels.float(), reduction="sum")


class PooledHead(nn.Module):
    """Dropout and a linear map of the pooled [CLS]: classes, a score, or one score an option."""

    def __init__(
        self,
        config: ModelConfig,
        head: HeadConfig,
        *,
        loss: Callable[[Tensor, Tensor], Tensor] = sum_entropies,
    ):
        super().__init__()
        self.choices = head.row.choices
        self.loss = loss
        self.dropout = nn.Dropout(head.dropout)
        self.score = nn.Linear(config.hidden_size, head.num_labels)

    def forward(self, encoded: dict, ends, max_seqlen: int, labels: Tensor | None = None) -> dict:
        """`logits` fp32 [B, C], or [B / 4, 4] of options; `loss_sum` if there are labels."""
        logits = self.score(self.dropout(encoded["pooled"])).float()
        if self.choices > 1:
            logits = logits.view(-1, self.choices)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss_sum": self.loss(logits, labels)}


class TokenHead(nn.Module):
    """Dropout and a linear map of every token to a tag."""

    def __init__(self, config: ModelConfig, head: HeadConfig):
        super().__init__()
        self.dropout = nn.Dropout(head.dropout)
        self.score = nn.Linear(config.hidden_size, head.num_labels)

    def forward(self, encoded: dict, ends, max_seqlen: int, labels: Tensor | None = None) -> dict:
        """`logits` fp32 [N, C]; with `labels` [N], -100 at [CLS] and [SEP], `loss_sum`.

        The loss of a sequence is the mean over its pieces, so that it does not depend on what is
        in the same micro-batch.
        """
        logits = self.score(self.dropout(encoded["last_hidden_state"])).float()
        if labels is None:
            return {"logits": logits}
        losses = F.cross_entropy(logits, labels, reduction="none")  # 0 at -100
        sequence = find_sequences(ends, len(logits))
        sums, pieces = (
            losses.new_zeros(len(ends) - 1).index_add(0, sequence, x)
            for x in (losses, (labels >= 0).to(losses.dtype))
        )
        return {"logits": logits, "loss_sum": (sums / pieces.clamp(min=1)).sum()}


class SpanHead(nn.Module):
    """SQuAD 1.1: start and end are scored apart, by one linear map of every token."""

    def __init__(self, config: ModelConfig, head: HeadConfig):
        super().__init__()
        self.score = nn.Linear(config.hidden_size, 2)

    def forward(
        self,
        encoded: dict,
        ends: Tensor,
        max_seqlen: int,
        allowed: Tensor | None = None,
        span_starts: Tensor | None = None,
        span_ends: Tensor | None = None,
        impossible: Tensor | None = None,
    ) -> dict:
        """`start`, `end` fp32 [N]; `loss_sum`, the mean of both cross entropies, given a span [B].

        Every token of a sequence is a candidate, as in BERT. The span of [CLS] means no answer.
        """
        start, end = self.score(encoded["last_hidden_state"]).float().unbind(1)
        if span_starts is None or span_ends is None:
            return {"start": start, "end": end}
        losses = [
            F.cross_entropy(pad(scores, ends, max_seqlen), target, reduction="sum")
            for scores, target in ((start, span_starts), (end, span_ends))
        ]
        return {"start": start, "end": end, "loss_sum": sum(losses) / 2}


class ConditionalSpanHead(nn.Module):
    """SQuAD 2.0: starts, ends given a start, and whether there is an answer (as released).

    In training the start is the true one. Otherwise each of the K best starts has K best ends.
    """

    def __init__(self, config: ModelConfig, head: HeadConfig):
        super().__init__()
        width = config.hidden_size
        self.start = nn.Linear(width, 1)
        self.end_hidden = nn.Linear(2 * width, width)
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.end_score = nn.Linear(width, 1)
        self.answer_hidden = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(head.dropout)
        self.answer_score = nn.Linear(width, 1, bias=False)

    def forward(
        self,
        encoded: dict,
        ends: Tensor,
        max_seqlen: int,
        allowed: Tensor,
        span_starts: Tensor | None = None,
        span_ends: Tensor | None = None,
        impossible: Tensor | None = None,
    ) -> dict:
        """With spans [B]: `loss_sum`. Without: `start_score`, `start_index` [B, K], `end_score`,
        `end_index` [B, K, K] (log probabilities, positions from [CLS]) and `impossible` [B], the
        logit of no answer. `allowed` bool [N] marks the tokens where a span may begin or end.
        """
        states = encoded["last_hidden_state"]  # [N, H]
        begins = ends[:-1].long()
        open_ = pad(allowed, ends, max_seqlen, fill=False)  # [B, T]

        def close(scores: Tensor) -> Tensor:
            return pad(scores, ends, max_seqlen).masked_fill(~open_, HIDDEN)

        starts = close(self.start(states).float().squeeze(1))  # [B, T]
        unanswerable = self._judge(states, starts, begins, ends)  # [B]
        if span_starts is not None and span_ends is not None and impossible is not None:
            end_scores = close(self._score_ends(states, begins + span_starts, ends))
            loss = F.cross_entropy(starts, span_starts, reduction="sum")
            loss = loss + F.cross_entropy(end_scores, span_ends, reduction="sum")
            answer = F.binary_cross_entropy_with_logits(
                unanswerable, impossible.float(), reduction="sum"
            )
            return {"impossible": unanswerable, "loss_sum": (loss + answer) / 2}
        start_score, start_index = starts.log_softmax(1).topk(NUM_TOP)  # [B, K]
        tops = []
        for k in range(NUM_TOP):
            # A sequence of fewer than K tokens has no k-th start; its score here is HIDDEN.
            start = (begins + start_index[:, k]).clamp(max=len(states) - 1)
            end_scores = close(self._score_ends(states, start, ends))
            tops.append(end_scores.log_softmax(1).topk(NUM_TOP))
        end_score, end_index = (torch.stack(x, dim=1) for x in zip(*tops, strict=True))
        return {
            "start_score": start_score,
            "start_index": start_index,
            "end_score": end_score,
            "end_index": end_index,
            "impossible": unanswerable,
        }

    def _score_ends(self, states: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """Scores [N] of every token as the end, given the start [B] of its sequence (in N)."""
        given = states.index_select(0, starts).index_select(0, find_sequences(ends, len(states)))
        hidden = torch.tanh(self.end_hidden(torch.cat([states, given], dim=1)))
        return self.end_score(self.layer_norm(hidden)).float().squeeze(1)

    def _judge(self, states: Tensor, starts: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
        """The logit [B] that there is no answer, from [CLS] and the expected start."""
        shares = starts.softmax(1)  # [B, T]
        sequence = find_sequences(ends, len(states))
        slots = find_slots(ends, len(states), shares.shape[1])
        share = shares.flatten().index_select(0, slots)  # [N]
        # In fp32: 16 bits lose most of a sum over hundreds of tokens.
        weighted = states.float() * share.unsqueeze(1)
        expected = weighted.new_zeros(len(begins), states.shape[1]).index_add(0, sequence, weighted)
        both = torch.cat([expected.to(states.dtype), states.index_select(0, begins)], dim=1)
        hidden = self.dropout(torch.tanh(self.answer_hidden(both)))
        return self.answer_score(hidden).float().squeeze(1)


def name_labels(head: HeadConfig) -> dict:
    """What Hugging Face's config.json says of classes."""
    names = dict(enumerate(head.labels))
    return {
        "id2label": {str(number): name for number, name in names.items()},
        "label2id": {name: number for number, name in names.items()},
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceHead:
    """The same head in transformers: one linear map, our `score`."""

    architecture: str
    layer: str  # their name of the linear map
    pipeline: str
    facts: Callable[[HeadConfig], dict] = lambda head: {}  # of config.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A kind of head, which a task names."""

    build: Callable[[ModelConfig, HeadConfig], nn.Module]
    width: Callable[[int], int]  # the task's number of labels -> outputs of the linear map
    reads_pooled: bool = False  # the pooled [CLS]; else every token
    choices: int = 1  # sequences that are scored together
    hugging_face: HuggingFaceHead | None = None
    not_exported: str = ""  # the reason, where transformers has no such head


HEADS = Table(Head) | {
    "classification": Head(
        build=PooledHead,
        width=lambda labels: labels,
        reads_pooled=True,
        hugging_face=HuggingFaceHead(
            architecture="AlbertForSequenceClassification",
            layer="classifier",
            pipeline="text-classification",
            facts=lambda head: name_labels(head) | {"problem_type": "single_label_classification"},
        ),
    ),
    "regression": Head(
        build=partial(PooledHead, loss=sum_squares),
        width=lambda labels: 1,
        reads_pooled=True,
        hugging_face=HuggingFaceHead(
            architecture="AlbertForSequenceClassification",
            layer="classifier",
            pipeline="text-classification",
            facts=lambda head: {"num_labels": 1, "problem_type": "regression"},
        ),
    ),
    "choice": Head(
        build=PooledHead,
        width=lambda labels: 1,
        reads_pooled=True,
        choices=CHOICES,
        hugging_face=HuggingFaceHead(
            architecture="AlbertForMultipleChoice",
            layer="classifier",
            pipeline="multiple-choice",
        ),
    ),
    "tokens": Head(
        build=TokenHead,
        width=lambda labels: labels,
        hugging_face=HuggingFaceHead(
            architecture="AlbertForTokenClassification",
            layer="classifier",
            pipeline="token-classification",
            facts=name_labels,
        ),
    ),
    "span": Head(
        build=SpanHead,
        width=lambda labels: 2,
        hugging_face=HuggingFaceHead(
            architecture="AlbertForQuestionAnswering",
            layer="qa_outputs",
            pipeline="question-answering",
        ),
    ),
    "conditional_span": Head(
        build=ConditionalSpanHead,
        width=lambda labels: 1,
        not_exported="its head scores the end of an answer given the start, and answerability by a "
        "classifier of its own (SQuAD 2.0)",
    ),
}


class AlbertForTask(nn.Module):
    """The encoder, with a pooler if the head needs it, and the head of a task.

    The same seed gives the same weights on every machine.
    """

    def __init__(self, config: ModelConfig, head: HeadConfig, *, seed: int = 0):
        super().__init__()
        assert config.pair_head == head.row.reads_pooled
        self.config = config
        self.albert = AlbertModel(config)
        self.head = head.row.build(config, head)
        init_weights(self, config.initializer_range, seed)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        **targets: Tensor,
    ) -> dict[str, Tensor]:
        """The head's outputs for sequences end to end: ids int64 [N], ends int32 [B + 1]."""
        output_positions = cu_seqlens[:-1].long() if self.albert.pooler is not None else None
        encoded = self.albert(
            input_ids, token_type_ids, position_ids, cu_seqlens, max_seqlen, output_positions
        )
        return self.head(encoded, cu_seqlens, max_seqlen, **targets)


def pad(x: Tensor, ends: Tensor, max_seqlen: int, fill: float | bool = HIDDEN) -> Tensor:
    """[N] -> [B, T]; T is at least NUM_TOP, so that there are always K best."""
    width = max(max_seqlen, NUM_TOP)
    slots = find_slots(ends, len(x), width)
    return x.new_full(((len(ends) - 1) * width,), fill).index_copy(0, slots, x).view(-1, width)
