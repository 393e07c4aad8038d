"""Factorised embedding: a narrow table V x E, then a map E -> H (section 3.1).

V x E + E x H parameters instead of V x H. Where E = H (the BERT baselines) there is no map.
Shapes: N tokens, V vocabulary, E embedding, H hidden.
"""

from torch import Tensor, nn

from albert_ds.model.config import ModelConfig
from albert_ds.model.dropout import Dropout


class FactorizedEmbedding(nn.Module):
    """Word, segment and position vectors summed at width E, normalised, then projected to H."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.embedding_size
        self.word = nn.Embedding(config.vocab_size, width)
        self.token_type = nn.Embedding(config.type_vocab_size, width)
        self.position = nn.Embedding(config.max_position_embeddings, width)
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)
        factorized = width != config.hidden_size
        self.projection = nn.Linear(width, config.hidden_size) if factorized else nn.Identity()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embed ids, each int64 [N]; returns [N, H]."""
        x = self.word(input_ids) + self.token_type(token_type_ids) + self.position(position_ids)
        return self.projection(self.dropout(self.layer_norm(x)))  # [N, E] -> [N, H]
