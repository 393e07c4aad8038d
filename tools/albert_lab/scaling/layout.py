"""One way to run a model on a cluster, and what each rank then computes and holds.

Letters as in model/config.py. N ranks = DP data-parallel x TP tensor-parallel; consecutive ranks
form a tensor-parallel group (as in parallel/mesh.py); every node has the same number of ranks.
"""

from dataclasses import dataclass
from functools import cached_property

from albert_ds.base.errors import UserError
from albert_ds.engine.deepspeed_config import refuse_eight_bits
from albert_ds.model.config import ModelConfig, count_flops
from albert_ds.model.shapes import count_params

PRECISIONS = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a weight in a pass
CHECKPOINTING = ("none", "attention", "block")
MASKED_FRACTION = 0.15  # share of the tokens that are predicted


@dataclass(frozen=True, kw_only=True)  # no slots: cached_property stores its value in the instance
class Layout:
    """A model on a cluster. Raises UserError for a layout that cannot exist."""

    name: str  # of the model, to print
    model: ModelConfig
    ranks: int  # N
    nodes: int = 1  # machines that the ranks are spread over
    zero: int = 1  # ZeRO stage
    tensor_parallel: int = 1  # TP
    micro_batch_size: int  # sequences of a pass (forward and backward) on one rank
    accumulation: int = 1  # passes per optimizer step
    sequence_length: int = 512  # tokens of a sequence, without padding
    precision: str = "bf16"  # of the passes; PRECISIONS
    activation_checkpointing: str = "none"  # CHECKPOINTING
    muon: bool = False  # updates the matrices of the blocks; LAMB or AdamW if False
    eight_bits: bool = False  # the blocks' products, beside bf16 (model/fp8.py)
    teacher: ModelConfig | None = None  # whole on every rank, without a backward pass

    def __post_init__(self):
        tp = self.tensor_parallel
        model = self.model
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
        positions = model.max_position_embeddings
        if self.sequence_length > positions:
            raise UserError(
                f"--sequence-length {self.sequence_length}: {self.name} has {positions} positions"
            )
        refused = refuse_eight_bits(model, tensor_parallel=tp) if self.eight_bits else None
        if refused is not None:
            raise UserError(f"--fp8: {self.name} is refused with {refused}")

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
    def needed_a_pass(self) -> int:
        """Tokens whose last state the heads need: the masked ones and each [CLS]."""
        return self.masked_a_pass + self.micro_batch_size

    @property
    def weight_bytes(self) -> int:
        return PRECISIONS[self.precision]

    @property
    def attention_parameters(self) -> int:
        """This rank's parameters of one attention block."""
        h = self.model.hidden_size
        tp = self.tensor_parallel
        return 4 * h * h // tp + 3 * h // tp + h + self._norm("attention")

    @property
    def ffn_parameters(self) -> int:
        """This rank's parameters of one feed-forward block."""
        h = self.model.hidden_size
        f = self.model.ffn_size
        tp = self.tensor_parallel
        return 2 * h * f // tp + f // tp + h + self._norm("ffn")

    def _norm(self, kind: str) -> int:
        return 0 if self.model.has_per_layer(f"{kind}.layer_norm") else 2 * self.model.hidden_size

    @property
    def own_parameters(self) -> int:
        """This rank's parameters of what all layers have of their own."""
        # A low-rank pair is cut where its projection is: one of its two factors.
        h = self.model.hidden_size
        f = self.model.ffn_size
        tp = self.tensor_parallel
        cut = self.model.lora_rank * (4 * h + 2 * f) * (tp - 1) // tp
        return count_params(self.model)["per_layer"] - self.model.num_layers * cut

    @property
    def block_parameters(self) -> int:
        return self.attention_parameters + self.ffn_parameters

    @cached_property
    def parameters(self) -> int:
        """Unique parameters of a rank, before ZeRO divides them."""
        counts = count_params(self.model)
        num_attention, num_ffn = self.model.num_blocks
        blocks = num_attention * self.attention_parameters + num_ffn * self.ffn_parameters
        return self._outside(counts) + blocks + self.own_parameters

    def _outside(self, counts: dict[str, int]) -> int:
        """The parameters outside the layers, which every rank has whole."""
        return sum(counts.values()) - counts["attention"] - counts["ffn"] - counts["per_layer"]

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix that Muon updates, whole, the shorter side first."""
        if not self.muon:
            return []
        h = self.model.hidden_size
        f = self.model.ffn_size
        num_attention, num_ffn = self.model.num_blocks
        return 4 * num_attention * [(h, h)] + 2 * num_ffn * [(min(h, f), max(h, f))]

    @property
    def cast_parameters(self) -> int:
        """Weights that are kept in eight bits during a pass, each as it lies and transposed."""
        h = self.model.hidden_size
        f = self.model.ffn_size
        num_attention, num_ffn = self.model.num_blocks
        return (num_attention * 4 * h * h + num_ffn * 2 * h * f) * self.eight_bits

    @property
    def eight_bit_share(self) -> float:
        """Share of `flops` in eight bits: the projections of all layers but the last."""
        h = self.model.hidden_size
        f = self.model.ffn_size
        layers = self.model.num_layers
        projections = 6 * self.tokens_a_pass * (layers - 1) * (4 * h * h + 2 * h * f)
        return projections * self.accumulation / self.flops * self.eight_bits

    @property
    def matrix_parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def newton_schulz_flops(self) -> float:
        """Of the rank that has most to do: five steps of two products and a square."""
        flops = [20 * rows**2 * columns + 10 * rows**3 for rows, columns in self.matrices]
        return max(sum(flops) / self.ranks, *flops) if flops else 0

    @property
    def held_parameters(self) -> float:
        """The parameters whose update this rank computes."""
        return self.parameters / (self.data_parallel if self.zero else 1)

    @cached_property
    def used_parameters(self) -> int:
        """Parameters that a pass reads: a shared block counts once per layer that uses it."""
        layers = self.model.num_layers * self.block_parameters + self.own_parameters
        return self._outside(count_params(self.model)) + layers

    @cached_property
    def flops(self) -> float:
        """Model FLOPs of one rank's optimizer step; tensor parallelism divides those of layers."""
        model = self.model
        tokens = self.tokens_a_pass
        masked = self.masked_a_pass
        e = model.embedding_size
        h = model.hidden_size
        squared = tokens * self.sequence_length
        whole = count_flops(model, tokens=tokens, squared_lengths=squared, masked=masked)
        outside = 6 * (tokens * e * h * model.has_map + masked * (h * e + e * model.vocab_size))
        layers = (whole - outside) / self.tensor_parallel
        return (outside + layers) * self.accumulation

    @property
    def recomputed_flops(self) -> float:
        """FLOPs that activation checkpointing adds: a second forward pass of the dropped parts."""
        h = self.model.hidden_size
        f = self.model.ffn_size
        layers = self.model.num_layers
        rank = self.model.lora_rank
        in_attention = 4 * h * h + 2 * h * self.sequence_length + rank * 8 * h
        attention = 2 * self.tokens_a_pass * layers * in_attention
        ffn = 2 * self.tokens_a_pass * layers * (2 * h * f + rank * 2 * (h + f))
        again = {"none": 0, "attention": attention, "block": attention + ffn}
        return again[self.activation_checkpointing] * self.accumulation / self.tensor_parallel

    @property
    def teacher_flops(self) -> float:
        """FLOPs of a teacher's forward passes, which no tensor parallelism divides."""
        if self.teacher is None:
            return 0
        tokens = self.tokens_a_pass
        masked = self.masked_a_pass
        squared = tokens * self.sequence_length
        whole = count_flops(self.teacher, tokens=tokens, squared_lengths=squared, masked=masked)
        return whole / 3 * self.accumulation

    @property
    def layer_elements(self) -> int:
        """Activation elements that the layers write in one pass, limited by memory bandwidth."""
        h = self.model.hidden_size
        f = self.model.ffn_size
        inner = (4 * h + 2 * f) // self.tensor_parallel
        return self.tokens_a_pass * self.model.num_layers * (inner + 4 * h)
