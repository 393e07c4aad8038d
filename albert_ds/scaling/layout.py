"""One way to run a model: what each rank then computes, holds and is sent.

Letters as in model/config.py; N ranks = DP data-parallel x TP tensor-parallel, neighbours in TP
first (as parallel/mesh.py lays them out), an equal number on every node.
"""

from dataclasses import dataclass

from albert_ds.errors import UserError
from albert_ds.model.arithmetic import count_flops, count_params
from albert_ds.model.config import ModelConfig, share

PRECISIONS = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a weight in a pass
CHECKPOINTING = ("none", "attention", "block")
MASKED_FRACTION = 0.15  # of the tokens are predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A model on a cluster. Raises UserError for one that cannot exist."""

    name: str  # of the model, for people
    model: ModelConfig
    ranks: int  # N
    nodes: int = 1  # machines they are spread over
    zero: int = 1  # ZeRO stage
    tensor_parallel: int = 1  # TP
    micro_batch_size: int  # sequences of one pass on one rank
    accumulation: int = 1  # passes of one optimizer step
    sequence_length: int = 512  # tokens of a sequence, all real
    precision: str = "bf16"  # of the passes
    gradient_bytes: int = 4  # of a gradient while it is reduced (communication_data_type)
    activation_checkpointing: str = "none"  # CHECKPOINTING

    def __post_init__(self):
        tp, model = self.tensor_parallel, self.model
        if self.ranks % tp or self.ranks % self.nodes:
            raise UserError(
                f"{self.ranks} ranks on {self.nodes} nodes with tensor parallelism {tp}: "
                "both must divide the ranks"
            )
        if model.num_heads % tp or model.ffn_size % tp:
            raise UserError(
                f"tensor parallelism {tp}: must divide {model.num_heads} heads and a "
                f"feed-forward width of {model.ffn_size}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"ZeRO stage {self.zero}; allowed: 0, 1, 2, 3")
        if self.precision not in PRECISIONS:
            raise UserError(f"precision {self.precision}; allowed: {', '.join(PRECISIONS)}")
        if self.activation_checkpointing not in CHECKPOINTING:
            raise UserError(
                f"activation checkpointing {self.activation_checkpointing}; "
                f"allowed: {', '.join(CHECKPOINTING)}"
            )

    @property
    def data_parallel(self) -> int:
        return self.ranks // self.tensor_parallel

    @property
    def ranks_a_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation * self.data_parallel

    @property
    def tokens_a_pass(self) -> int:
        return self.micro_batch_size * self.sequence_length

    @property
    def masked_a_pass(self) -> int:
        return self.micro_batch_size * max(1, round(MASKED_FRACTION * self.sequence_length))

    @property
    def read_a_pass(self) -> int:
        """Tokens whose last state is asked for: the masked and each [CLS]."""
        return self.masked_a_pass + self.micro_batch_size

    @property
    def weight_bytes(self) -> int:
        return PRECISIONS[self.precision]

    @property
    def block_parameters(self) -> int:
        """Of one layer's attention and feed-forward, this rank's part of them."""
        h, f, tp = self.model.hidden_size, self.model.ffn_size, self.tensor_parallel
        attention = 4 * h * h // tp + 3 * h // tp + h + 2 * h
        return attention + 2 * h * f // tp + f // tp + h + 2 * h

    @property
    def parameters(self) -> int:
        """Unique parameters of a rank, before ZeRO divides them."""
        counts = count_params(self.model)
        blocks = len(set(share(self.model.sharing, self.model.num_layers)))
        if self.tensor_parallel == 1:
            return sum(counts.values())
        if self.model.sharing in ("attention", "ffn"):
            raise UserError("a model that shares only attention or feed-forward: not under TP here")
        return (
            sum(counts.values()) - counts["attention"] - counts["ffn"]
        ) + blocks * self.block_parameters

    @property
    def held_parameters(self) -> float:
        """Of those, the ones whose update this rank computes."""
        return self.parameters / (self.data_parallel if self.zero else 1)

    @property
    def used_parameters(self) -> int:
        """Parameters that a pass reads, a shared block once for each layer that uses it."""
        counts = count_params(self.model)
        outside = sum(counts.values()) - counts["attention"] - counts["ffn"]
        return outside + self.model.num_layers * self.block_parameters

    @property
    def hideable_share(self) -> float:
        """Share of the parameters whose gradients are complete before backward's last layer.

        Blocks that one layer alone uses. A shared block's is complete only when backward has come
        to the first layer; so is the embedding's, which the MLM head shares.
        """
        plan = share(self.model.sharing, self.model.num_layers)
        counts = count_params(self.model)
        early = 0.0
        for part, used in zip(("attention", "ffn"), zip(*plan, strict=True), strict=True):
            once = sum(used.count(block) == 1 for block in set(used))
            early += counts[part] * once / len(set(used))
        return early / sum(counts.values())

    @property
    def flops(self) -> float:
        """Of one rank's optimizer step: model FLOPs, as counted for MFU."""
        tokens = self.tokens_a_pass
        a_pass = count_flops(
            self.model,
            tokens=tokens,
            squared_lengths=tokens * self.sequence_length,
            masked=self.masked_a_pass,
        )
        return a_pass * self.accumulation / self.tensor_parallel

    @property
    def recomputed_flops(self) -> float:
        """What activation checkpointing adds to `flops`: a forward pass of what it dropped."""
        h, layers = self.model.hidden_size, self.model.num_layers
        attention = 2 * self.tokens_a_pass * layers * (4 * h * h + 2 * h * self.sequence_length)
        ffn = 2 * self.tokens_a_pass * layers * 2 * h * self.model.ffn_size
        again = {"none": 0, "attention": attention, "block": attention + ffn}
        return again[self.activation_checkpointing] * self.accumulation / self.tensor_parallel

    @property
    def layer_elements(self) -> int:
        """Activations that one pass writes in its layers, in elements: what bandwidth limits."""
        h, f = self.model.hidden_size, self.model.ffn_size
        inner = (4 * h + 2 * f) // self.tensor_parallel
        return self.tokens_a_pass * self.model.num_layers * (inner + 4 * h)
