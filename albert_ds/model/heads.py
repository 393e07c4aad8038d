"""What pretraining asks: masked words (MLM, section 4.1) and sentence pairs (NSP or SOP, 3.1).

Both give SUMS of cross entropies in fp32, because only the trainer knows how many positions the
whole batch has.
Shapes: B sequences, P masked positions, V vocabulary, E embedding, H hidden.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from albert_ds.model.config import ModelConfig

CHUNK_ROWS = 4096  # positions whose V-wide scores exist at once: 0.5 GB in fp32 at V = 30,000


class MlmHead(nn.Module):
    """H -> E, tanh-GELU, LayerNorm, then the word embedding, transposed, and a bias of its own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.embedding_size)
        self.layer_norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def project(self, hidden: Tensor) -> Tensor:
        """Bring states [P, H] back to the embedding's width: [P, E]."""
        return self.layer_norm(F.gelu(self.transform(hidden), approximate="tanh"))

    def logits(self, hidden: Tensor, word: Tensor) -> Tensor:
        """Score the vocabulary: states [P, H], embedding [V, E]; returns fp32 [P, V]."""
        return F.linear(self.project(hidden), word, self.bias).float()

    def forward(self, hidden: Tensor, labels: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        """Predict labels int64 [P] from states [P, H] with the embedding [V, E].

        Returns the sum of the cross entropies (fp32 scalar) and the number right (int64 scalar).
        Without positions both are 0, and still reach every parameter: ranks wait for each other's
        gradients.
        """
        x = self.project(hidden)
        # split() of no rows is one chunk of no rows.
        chunks = list(zip(x.split(CHUNK_ROWS), labels.split(CHUNK_ROWS), strict=True))
        score = score_words
        if len(chunks) > 1 and torch.is_grad_enabled():
            score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
        parts = [score(*chunk, word, self.bias) for chunk in chunks]
        losses, corrects = zip(*parts, strict=True)
        return torch.stack(losses).sum(), torch.stack(corrects).sum()


def score_words(x: Tensor, labels: Tensor, word: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of cross entropies and number right for states [rows, E]."""
    logits = F.linear(x, word, bias).float()  # [rows, V]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss, (logits.detach().argmax(-1) == labels).sum()


def score_pairs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of cross entropies and number right for logits [B, 2]; -100 labels count for neither."""
    logits = logits.float()
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return loss, (logits.detach().argmax(-1) == labels).sum()
