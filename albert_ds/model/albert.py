"""ALBERT: factorised embedding, encoder and pooler, and the two pretraining heads (section 3.1).

Plain PyTorch: it knows nothing of ranks, process groups or precision. The forward pass returns its
hidden states, so that studying them needs no hooks. Losses are SUMS of cross entropies in fp32,
because only the trainer knows how many positions the whole batch has.
Shapes: B sequences, N tokens, R output positions, P masked positions, V vocabulary, E embedding, H
hidden, L layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from albert_ds.base.plugin import Table
from albert_ds.model.config import DIVERGENCE_BYTES, ModelConfig, count_score_rows
from albert_ds.model.cross_entropy import sum_cross_entropy, sum_over_vocabulary
from albert_ds.model.draws import Draws
from albert_ds.model.dropout import Dropout
from albert_ds.model.encoder import Encoder
from albert_ds.model.even_shapes import is_shape_bound, pad_tokens, round_tokens
from albert_ds.model.fused import Linear, linear
from albert_ds.model.teacher import Goals, Teacher, sum_divergences

APART = 0x5DEECE66  # makes another seed: torch reads 32 bits of one


class FactorizedEmbedding(nn.Module):
    """Word, segment and position vectors summed at width E, normalised, then projected to H.

    V x E + E x H parameters instead of V x H. If E = H (the BERT baselines) there is no map.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.embedding_size
        rows = config.vocab_size, config.type_vocab_size, config.max_position_embeddings
        # From empty tensors: torch's own draws would be lost, and on the meta device import Dynamo.
        self.word, self.token_type, self.position = (
            nn.Embedding.from_pretrained(torch.empty(count, width), freeze=False) for count in rows
        )
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)
        self.projection = Linear(width, config.hidden_size) if config.has_map else nn.Identity()

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        draws: Draws | None = None,
    ) -> Tensor:
        """Embed ids, each int64 [N]; returns [N, H]."""
        x = self.word(input_ids) + self.token_type(token_type_ids) + self.position(position_ids)
        return self.projection(self.dropout(self.layer_norm(x), draws))  # [N, E] -> [N, H]


class AlbertModel(nn.Module):
    """The part that fine-tuning starts from. Load its weights, or call `init_weights`."""

    def __init__(self, config: ModelConfig, *, activation_checkpointing: str = "none"):
        super().__init__()
        self.embeddings = FactorizedEmbedding(config)
        self.encoder = Encoder(config, activation_checkpointing)
        self.pooler = (
            nn.Linear(config.hidden_size, config.hidden_size) if config.pair_head else None
        )

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        output_positions: Tensor | None = None,
        seeds: Tensor | None = None,
    ) -> dict:
        """Encode sequences end to end: ids int64 [N], ends int32 [B + 1], the longest length.

        output_positions: int64 [R], ascending, with every [CLS]: the tokens whose last hidden state
        is needed. The last layer is computed for these alone, and its state is [R, H]. None: all.
        seeds: int64 [N], of each token's dropout (`model/draws.py`). None: from torch's generator.

        Returns `last_hidden_state` [N, H], `pooled` [B, H] (None without a pooler) and
        `hidden_states`, the L + 1 states [N, H] from the embedding to the last layer.
        """
        ids = [input_ids, token_type_ids, position_ids]
        draws = None
        if self.training and self.embeddings.dropout.p:
            if seeds is None:
                draws = Draws.anew(cu_seqlens, len(input_ids))
            else:
                draws = Draws(seeds, cu_seqlens)
        query = self.encoder.attention[0].get_submodule("self_attention.query")
        number = len(input_ids)
        ends = cu_seqlens
        added = round_tokens(number) - number
        # Not under tensor parallelism, which sends the rows: more of them cost more.
        if added and isinstance(query, nn.Linear) and is_shape_bound(query.weight):
            more = -(-added // max_seqlen)
            rows = [*ids, *([draws.seeds] if draws else [])]
            rows, ends = pad_tokens(rows, ends, number + added, more)
            ids = rows[:3]
            draws = Draws(rows[3], ends) if draws else None
        *states, last = self.encoder(
            self.embeddings(*ids, draws), ends, max_seqlen, output_positions, draws
        )
        if ends is not cu_seqlens:
            states = [x[:number] for x in states]
            last = last[:number] if output_positions is None else last
        states.append(last)
        pooled = None
        if self.pooler is not None:
            first = find_first(cu_seqlens, len(input_ids))
            place = (
                first if output_positions is None else torch.searchsorted(output_positions, first)
            )
            pooled = torch.tanh(self.pooler(states[-1].index_select(0, place)))
        return {"last_hidden_state": states[-1], "pooled": pooled, "hidden_states": states}


def find_first(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The [CLS] of each sequence, int32 [B]; of an empty one at the end the last token."""
    return cu_seqlens[:-1].clamp(max=tokens - 1)


class MlmHead(nn.Module):
    """H -> E, tanh-GELU, LayerNorm, then the word embedding, transposed, and a bias of its own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.transform = Linear(config.hidden_size, config.embedding_size)
        self.layer_norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def project(self, hidden: Tensor) -> Tensor:
        """Bring states [P, H] back to the embedding's width: [P, E]."""
        return self.layer_norm(F.gelu(self.transform(hidden), approximate="tanh"))

    def logits(self, hidden: Tensor, word: Tensor) -> Tensor:
        """Score the vocabulary: states [P, H], embedding [V, E]; returns fp32 [P, V]."""
        return linear(self.project(hidden), word, self.bias).float()

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        word: Tensor,
        z_loss: bool = False,
        goals: Goals | None = None,
    ) -> tuple[Tensor, ...]:
        """Predict labels int64 [P] from states [P, H] with the embedding [V, E].

        Returns the sum of the cross entropies (fp32 scalar), the number of correct predictions
        (int64 scalar), with `z_loss` the sum of log(Z)^2 (fp32 scalar), Z the softmax's
        denominator, and with `goals` that of the divergences from them (fp32 scalar). Without
        positions all are 0 and still depend on every parameter, because ranks wait for each other's
        gradients.
        """
        targets = [labels]
        width = hidden.dtype.itemsize
        if goals is not None:
            targets += goals
            width += DIVERGENCE_BYTES
        x = self.project(hidden)
        rows = count_score_rows(len(word), width)
        # split() of no rows is one chunk of no rows.
        chunks = list(zip(*(each.split(rows) for each in (x, *targets)), strict=True))
        score = score_words
        if len(chunks) > 1 and torch.is_grad_enabled():
            score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
        parts = [score(word, self.bias, z_loss, *chunk) for chunk in chunks]
        return tuple(torch.stack(sums).sum() for sums in zip(*parts, strict=True))


def score_words(
    word: Tensor, bias: Tensor, z_loss: bool, x: Tensor, labels: Tensor, *goals: Tensor
) -> tuple[Tensor, ...]:
    """The sums of `MlmHead.forward` for states [rows, E]."""
    scores = linear(x, word, bias)  # [rows, V]
    sums = sum_over_vocabulary(scores, labels, z_loss)
    return (*sums, sum_divergences(scores, labels, Goals(*goals))) if goals else sums


class AlbertForPretraining(nn.Module):
    """The model with its MLM head and, if config.pair_head, its two-way sentence head.

    `exits`: layers after which the MLM loss counts as well while training, and its weight there.
    `z_loss`: weight of the last layer's log(Z)^2 while training (Chowdhery et al. 2022, section 5).
    `teacher`: the model whose scores are goals while training, if there is one.
    The same seed gives the same weights on every machine.
    """

    teacher: Teacher | None = None

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        activation_checkpointing: str = "none",
        exits: Mapping[int, float] = MappingProxyType({}),
        z_loss: float = 0.0,
    ):
        super().__init__()
        self.config, self.exits, self.z_loss = config, exits, z_loss
        self.albert = AlbertModel(config, activation_checkpointing=activation_checkpointing)
        self.mlm_head = MlmHead(config)
        self.pair_head = nn.Linear(config.hidden_size, 2) if config.pair_head else None
        init_weights(self, config.initializer_range, seed)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        masked_positions: Tensor,
        masked_labels: Tensor,
        pair_labels: Tensor,
        seeds: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Compute the losses of a micro-batch: ids int64 [N], ends int32 [B + 1], masked int64 [P].

        Returns for each of TERMS the scalar `NAME_loss_sum` (fp32), and `NAME_correct` (int64) if
        it counts right predictions; both are 0 where a term does not apply. Pair labels are int64
        [B]; -100 counts in neither. With `scales`, fp32 [len(PER)], also `loss`: each term's sum
        times the scale of what it is a mean over.
        """
        tokens = {
            "input_ids": input_ids,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
            "masked_positions": masked_positions,
        }
        masked, encoded = self.encode(**tokens, seeds=seeds)
        word = self.albert.embeddings.word.weight
        has_z_loss = self.training and self.z_loss > 0
        goals = self.teacher.score(**tokens) if self.training and self.teacher else None
        loss, correct, *more = self.mlm_head(masked, masked_labels, word, has_z_loss, goals)
        states = Encoded(
            words=(loss, correct),
            squares=more[0] if has_z_loss else None,
            divergence=None if goals is None else more[-1],
            inner=encoded["hidden_states"][:-1],
            pooled=encoded["pooled"],
            masked_positions=masked_positions,
            masked_labels=masked_labels,
            pair_labels=pair_labels,
        )
        outputs: dict[str, Tensor] = {}
        parts: list[Tensor] = []
        for name, term in TERMS.items():
            computed = term.compute(self, states)
            loss, *correct = computed or [torch.zeros_like(x) for x in states.words]
            outputs[f"{name}_loss_sum"] = loss
            if term.has_accuracy:
                outputs[f"{name}_correct"] = correct[0]
            if computed and scales is not None:
                parts.append(loss * scales[PER.index(term.per)])
        return outputs | {"loss": sum(parts[1:], parts[0])} if parts else outputs

    def encode(
        self,
        *,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        masked_positions: Tensor,
        seeds: Tensor | None = None,
    ) -> tuple[Tensor, dict]:
        """The last state of each masked token [P, H], and what `AlbertModel.forward` returns."""
        # The heads need the last state of these tokens only: [CLS] and the masked ones.
        first = find_first(cu_seqlens, len(input_ids))
        output_positions, _ = torch.cat([first, masked_positions]).sort()
        tokens = input_ids, token_type_ids, position_ids
        encoded = self.albert(*tokens, cu_seqlens, max_seqlen, output_positions, seeds)
        place = torch.searchsorted(output_positions, masked_positions)
        return encoded["last_hidden_state"].index_select(0, place), encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """What the terms of the loss are computed from."""

    words: tuple[Tensor, Tensor]  # `MlmHead.forward` of the last layer
    squares: Tensor | None  # its sum of log(Z)^2
    divergence: Tensor | None  # its sum of the divergences from the teacher's goals
    inner: list[Tensor]  # the states [N, H] before the last layer's
    pooled: Tensor | None  # [B, H]
    masked_positions: Tensor  # int64 [P]
    masked_labels: Tensor  # int64 [P]
    pair_labels: Tensor  # int64 [B]


Found = tuple[Tensor, ...] | None  # a sum of losses and perhaps of right predictions


def compute_words(model: AlbertForPretraining, states: Encoded) -> Found:
    """Cross entropies of the masked words."""
    return states.words


def compute_pairs(model: AlbertForPretraining, states: Encoded) -> Found:
    """Cross entropies of the sentence task."""
    if model.pair_head is None:
        return None
    return sum_cross_entropy(model.pair_head(states.pooled), states.pair_labels)  # of [B, 2]


def compute_exits(model: AlbertForPretraining, states: Encoded) -> Found:
    """The weighted cross entropies of the masked words at the exits before the last layer."""
    total = None
    word = model.albert.embeddings.word.weight
    for layer, weight in model.exits.items() if model.training else ():
        if layer < len(states.inner):
            masked = states.inner[layer].index_select(0, states.masked_positions)
            part = weight * model.mlm_head(masked, states.masked_labels, word)[0]
            total = part if total is None else total + part
    return None if total is None else (total,)


def compute_squares(model: AlbertForPretraining, states: Encoded) -> Found:
    """The weighted squares of log(Z) at the masked words."""
    return None if states.squares is None else (model.z_loss * states.squares,)


def compute_divergence(model: AlbertForPretraining, states: Encoded) -> Found:
    """The weighted divergences of the masked words' scores from the teacher's."""
    if model.teacher is None or states.divergence is None:
        return None
    return (model.teacher.weight * states.divergence,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A part of the loss, a mean over the global batch."""

    compute: Callable[[AlbertForPretraining, Encoded], Found]  # None where it does not apply
    per: str  # of PER
    has_accuracy: bool = False
    of_sentence_task: bool = False  # the metrics call it as the objective


PER = ("masked", "pairs")  # counts of a batch that a term may be a mean over
TERMS = Table(Term) | {
    "mlm": Term(compute=compute_words, per="masked", has_accuracy=True),
    "pair": Term(compute=compute_pairs, per="pairs", has_accuracy=True, of_sentence_task=True),
    "exit": Term(compute=compute_exits, per="masked"),
    "z": Term(compute=compute_squares, per="masked"),
    "teacher": Term(compute=compute_divergence, per="masked"),
}


def name_outputs() -> list[str]:
    """The scalars of a forward pass that are summed over a batch."""
    names = []
    for name, term in TERMS.items():
        names.append(f"{name}_loss_sum")
        if term.has_accuracy:
            names.append(f"{name}_correct")
    return names


@torch.no_grad()
def init_weights(module: nn.Module, std: float, seed: int) -> None:
    """Initialise every parameter of a module, in the order of its `parameters()`, from one seed.

    The names of parameters decide what happens to them, here and elsewhere:

    | name                         | starts as      | LAMB: decay, ratio | tensor parallelism cuts |
    | ---------------------------- | -------------- | ------------------ | ----------------------- |
    | *.bias                       | 0              | no                 | query, key, value, up   |
    | *.gain                       | 0              | no                 | none                    |
    | *layer_norm.weight, *.scale  | 1              | no                 | none                    |
    | *.first (low rank)           | normal(0, std) | yes                | output, down            |
    | *.second (low rank)          | 0              | yes                | query, key, value, up   |
    | every other                  | normal(0, std) | yes                | all six projections     |

    Decay and ratio: `decay_groups` in `optim/adam.py`. Cuts: `PROJECTIONS` in
    `model/projections.py`. What an export does with those of a layer's own: `fold` in
    `model/per_layer.py`. `normal` is drawn again while beyond 2 std. Parameters on the meta device
    have no values and are skipped. `*.first` have draws of their own, so that all others start
    alike with and without them.
    """
    generator, apart = (torch.Generator().manual_seed(s) for s in (seed, seed ^ APART))
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            continue
        if name.endswith(("bias", ".gain", ".second")):
            parameter.zero_()
        elif name.endswith(("layer_norm.weight", ".scale")):
            parameter.fill_(1)
        else:
            chosen = apart if name.endswith(".first") else generator
            _truncated_normal_(parameter.view(-1), std, chosen)


def _truncated_normal_(x: Tensor, std: float, generator: torch.Generator) -> None:
    # Drawing the 4.6 % beyond two standard deviations again is 30 times faster than trunc_normal_,
    # which inverts the error function for every value.
    x.normal_(0, std, generator=generator)
    outside = (x.abs() > 2 * std).nonzero().squeeze(1)
    while len(outside):
        again = torch.empty(len(outside)).normal_(0, std, generator=generator)
        x[outside] = again
        outside = outside[again.abs() > 2 * std]
