"""ALBERT: embedding, encoder and pooler, and with its two heads what is pretrained (section 3.1).

Plain PyTorch: no rank, no process group, no precision. The forward pass returns its intermediates,
so that whoever studies them needs no hooks.
Shapes: B sequences, N tokens, P masked positions, V vocabulary, E embedding, H hidden.
"""

import torch
from torch import Tensor, nn

from albert_ds.model.config import ModelConfig
from albert_ds.model.embedding import FactorizedEmbedding
from albert_ds.model.encoder import Encoder
from albert_ds.model.heads import MlmHead, score_pairs


class AlbertModel(nn.Module):
    """The encoder, which fine-tuning starts from; load its weights, or `init_weights`."""

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
        read: Tensor | None = None,
    ) -> dict:
        """Encode sequences end to end: ids int64 [N], ends int32 [B + 1], the longest length.

        read: the tokens, int64 [R] ascending, whose last state is asked for, each [CLS] among
        them; None: all. What nobody reads is not computed, and R takes the place of N there.

        Returns `last_hidden_state` [N, H], `pooled` [B, H] (None without a pooler) and
        `hidden_states`, the L + 1 states [N, H] from the embedding to the last layer.
        """
        embedded = self.embeddings(input_ids, token_type_ids, position_ids)
        states = self.encoder(embedded, cu_seqlens, max_seqlen, read)
        pooled = None
        if self.pooler is not None:
            first = cu_seqlens[:-1]  # the [CLS] of each sequence
            place = first if read is None else torch.searchsorted(read, first)
            pooled = torch.tanh(self.pooler(states[-1].index_select(0, place)))
        return {"last_hidden_state": states[-1], "pooled": pooled, "hidden_states": states}


class AlbertForPretraining(nn.Module):
    """The model with its MLM head and, where config.pair_head, its two-way sentence head.

    The same seed gives the same weights on every machine.
    """

    def __init__(
        self, config: ModelConfig, *, seed: int = 0, activation_checkpointing: str = "none"
    ):
        super().__init__()
        self.config = config
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
    ) -> dict[str, Tensor]:
        """Losses of a micro-batch: ids int64 [N], ends int32 [B + 1], masked int64 [P], pairs [B].

        Returns `mlm_loss_sum`, `pair_loss_sum` (fp32 sums of cross entropies), `mlm_correct` and
        `pair_correct` (int64 counts), all scalars. A pair labelled -100 counts in neither; without
        a sentence head both are 0.
        """
        # Of the last layer only these tokens are read, and only the masked reach the vocabulary.
        read, _ = torch.cat([cu_seqlens[:-1], masked_positions]).sort()
        encoded = self.albert(input_ids, token_type_ids, position_ids, cu_seqlens, max_seqlen, read)
        place = torch.searchsorted(read, masked_positions)
        masked = encoded["last_hidden_state"].index_select(0, place)  # [P, H]
        word = self.albert.embeddings.word.weight
        mlm_loss, mlm_correct = self.mlm_head(masked, masked_labels, word)
        if self.pair_head is not None:
            pair_loss, pair_correct = score_pairs(self.pair_head(encoded["pooled"]), pair_labels)
        else:
            pair_loss, pair_correct = torch.zeros_like(mlm_loss), torch.zeros_like(mlm_correct)
        return {
            "mlm_loss_sum": mlm_loss,
            "mlm_correct": mlm_correct,
            "pair_loss_sum": pair_loss,
            "pair_correct": pair_correct,
        }


@torch.no_grad()
def init_weights(module: nn.Module, std: float, seed: int) -> None:
    """Initialise every parameter of a module, in the order of its `parameters()`, from one seed.

    | parameter                           | value                                             |
    | ----------------------------------- | ------------------------------------------------- |
    | *.bias                              | 0                                                 |
    | *layer_norm.weight                  | 1                                                 |
    | every other (kernels, embeddings)   | normal(0, std), drawn again while beyond 2 std    |

    Parameters on the meta device have no values and are left alone.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif name.endswith("layer_norm.weight"):
            parameter.fill_(1)
        else:
            _truncated_normal_(parameter.view(-1), std, generator)


def _truncated_normal_(x: Tensor, std: float, generator: torch.Generator) -> None:
    # Drawing again the 4.6 % beyond two standard deviations takes a thirtieth of the time of
    # trunc_normal_, which inverts the error function for every value.
    x.normal_(0, std, generator=generator)
    outside = (x.abs() > 2 * std).nonzero().squeeze(1)
    while len(outside):
        again = torch.empty(len(outside)).normal_(0, std, generator=generator)
        x[outside] = again
        outside = outside[again.abs() > 2 * std]
