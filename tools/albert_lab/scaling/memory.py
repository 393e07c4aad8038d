"""Peak memory of a rank, counted from the tensors that the program keeps.

Four moments compete: a teacher's pass, the MLM head's scores, and the last layer's backward, each
with every layer's activations; the optimizer's temporaries, when the activations are freed. Added
to each: the weights, master weights and moments, and the teacher's weights, which always exist.
Bytes per parameter were counted in DeepSpeed's optimizers and this project's LAMB; a test
measures them.
"""

from dataclasses import dataclass

from albert_ds.model.config import CACHED_SCORES, DIVERGENCE_BYTES, count_score_rows
from albert_ds.model.shapes import count_params
from albert_lab.scaling.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesAParameter:
    """Of a rank. A pair: for each parameter, and for each in its partition of the DP ranks."""

    lives: tuple[float, float]  # kept from step to step
    gradients: tuple[float, float]  # kept between passes, if not in `lives`
    bucket: float  # for the reduction, from the start of the last backward pass
    update: tuple[float, float]  # beyond `lives` during the update, with the gradients


# Lives: weights in the passes' type, fp32 masters and two moments; in bf16 also ZeRO-1's fp32 sum
# of the gradients, and a further partition at ZeRO-3. Update: gradients, their bucket, LAMB's
# update.
STATES = {
    ("fp32", 0): BytesAParameter(lives=(12, 0), gradients=(4, 0), bucket=0, update=(8, 0)),
    ("fp32", 1): BytesAParameter(lives=(4, 12), gradients=(4, 0), bucket=4, update=(4, 8)),
    ("bf16", 1): BytesAParameter(lives=(6, 12), gradients=(0, 0), bucket=0, update=(0, 4)),
    ("bf16", 2): BytesAParameter(lives=(2, 12), gradients=(0, 4), bucket=2, update=(8, 4)),
    ("bf16", 3): BytesAParameter(lives=(4, 18), gradients=(0, 4), bucket=2, update=(4, 4)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank, by the moment of a step."""

    lives: float  # weights, masters, moments
    teacher: float  # its weights
    teacher_pass: float  # its states or its scores
    activations: float  # kept for backward
    head: float  # scores over the vocabulary, and their gradients
    backward: float  # of the last layer, with its recomputation
    gradients: float  # of earlier passes, and the bucket
    eight_bits: float  # of the blocks' weights, during a pass
    update: float  # the optimizer's temporaries

    @property
    def at_peak(self) -> dict[str, float]:
        """What is live at the peak, by name; the values add up to it."""
        moments = {
            "the teacher's pass": self.teacher_pass,
            "scores over the vocabulary": self.head,
            "backward of the last layer": self.backward,
        }
        largest = max(moments, key=lambda name: moments[name])
        in_a_pass = {
            "gradients of earlier passes, bucket": self.gradients,
            "activations": self.activations,
            **({"weights in eight bits": self.eight_bits} if self.eight_bits else {}),
            largest: moments[largest],
        }
        in_the_update = {"temporaries of the optimizer": self.update}
        return {
            "weights, masters, moments": self.lives,
            **({"the teacher's weights": self.teacher} if self.teacher else {}),
            **max(in_a_pass, in_the_update, key=lambda parts: sum(parts.values())),
        }

    @property
    def peak(self) -> float:
        return sum(self.at_peak.values())


def predict_memory(layout: Layout, *, on_cuda: bool = True) -> Memory:
    """Bytes of a rank. On a CPU dropout is not counted.

    Raises KeyError for a precision and ZeRO stage that no shipped configuration has.
    """
    states = STATES[states_key(layout)]
    model = layout.model
    parameters = layout.parameters
    replicas = layout.data_parallel

    def held(pair: tuple[float, float]) -> float:
        return parameters * (pair[0] + pair[1] / replicas)

    width = layout.weight_bytes
    tokens = layout.tokens_a_pass
    kept, again = bytes_a_token(layout, on_cuda=on_cuda)
    # Of a token whose last state no head needs, the last layer keeps only input, key and value.
    unneeded = tokens - layout.needed_a_pass
    spared = unneeded * (
        kept + again - (1 + 2 / layout.tensor_parallel) * model.hidden_size * width
    )
    inner = model.ffn_size // layout.tensor_parallel
    matrix = model.hidden_size * inner * width
    # Backward in eight bits: the gradient of the inner layer cast twice, and a layer's own of the
    # weight beside the sum.
    casts = (2 * tokens * inner + matrix) * layout.eight_bits
    word = model.vocab_size * model.embedding_size * width
    # A block's gradients replace its last layer's activations, and can be larger.
    growth = max(0.0, layout.block_parameters * width - tokens * (kept + again) + spared)
    # Muon has one moment and no update of a matrix; a rank holds whole ones, and multiplies one.
    spare = 4 * layout.matrix_parameters / layout.tensor_parallel / (replicas if layout.zero else 1)
    products = [2 * rows * (columns + rows) for rows, columns in layout.matrices]
    whole = 4 * (layout.matrix_parameters / layout.ranks + max(products, default=0))
    # At ZeRO-0 the norm of the gradients is computed in float64, tensor by tensor.
    norm = 4 * parameters + 4 * max(word, matrix)
    teacher, teacher_pass = count_teacher(layout)
    return Memory(
        lives=held(states.lives) - spare,
        teacher=teacher,
        teacher_pass=teacher_pass,
        activations=tokens * (model.num_layers * kept + 2 * model.hidden_size * width)
        - max(0.0, spared - unneeded * again),
        head=count_head(layout, on_cuda=on_cuda),
        backward=word + matrix + 2 * tokens * inner * width + casts + tokens * again + growth,
        gradients=held(states.gradients) * (layout.accumulation > 1) + parameters * states.bucket,
        eight_bits=2 * layout.cast_parameters,
        update=max(held(states.update) - spare + whole, 0 if layout.zero else norm),
    )


def count_scores(layout: Layout) -> int:
    """Scores of the masked positions that exist at once."""
    size = layout.model.vocab_size
    width = layout.weight_bytes
    rows = count_score_rows(size, width + DIVERGENCE_BYTES * (layout.teacher is not None))
    return size * min(layout.masked_a_pass, rows)


def count_head(layout: Layout, *, on_cuda: bool) -> float:
    """Bytes of the scores, and of their gradient or of the divergence from a teacher's; a CPU has
    a few rows of scores and gradient in fp32, too."""
    scores = count_scores(layout)
    width = layout.weight_bytes
    if layout.teacher is not None:
        return scores * (width + 2 * DIVERGENCE_BYTES)
    return 2 * (scores * width + 4 * CACHED_SCORES * (not on_cuda))


def count_teacher(layout: Layout) -> tuple[float, float]:
    """Bytes of a teacher's weights, and of its pass, which keeps nothing for a backward one."""
    if layout.teacher is None:
        return 0, 0
    model = layout.teacher
    tokens = layout.tokens_a_pass
    h = model.hidden_size
    f = model.ffn_size
    joined = 3 * model.num_blocks[0]
    # All states, the inner layer before and after GELU, and the joined projections of attention.
    states = tokens * (model.num_layers * h + 2 * f) + joined * h * h
    # The scores in fp32, the same without the top, and a temporary of their logsumexp.
    most = max(states * layout.weight_bytes, 12 * count_scores(layout))
    return sum(count_params(model).values()) * layout.weight_bytes, most


def states_key(layout: Layout) -> tuple[str, int]:
    return ("fp32" if layout.precision == "fp32" else "bf16", layout.zero)


def bytes_a_token(layout: Layout, *, on_cuda: bool) -> tuple[float, float]:
    """Bytes that a layer keeps per token, and bytes that its backward recomputes."""
    model = layout.model
    tp = layout.tensor_parallel
    width = layout.weight_bytes
    h = model.hidden_size
    f = model.ffn_size
    length = layout.sequence_length
    # Query, key, value, output. A CPU keeps the output twice, in 16 bits the probabilities instead.
    inside = 4 * h if on_cuda else 5 * h if width == 4 else 4 * h + model.num_heads * length
    attention = 2 * h + inside / tp  # its input and its sum before LayerNorm
    ffn = 2 * h + 2 * f / tp  # the same, and the inner layer before and after GELU
    # Kept of what a layer has of its own: a factor keeps the result, a low-rank pair what lies
    # between its factors.
    scaled = h * model.has_per_layer("attention.result")
    rank = model.lora_rank
    attention += scaled + 4 * rank
    ffn += scaled + 2 * rank
    # In eight bits the inputs of products take half. Attention keeps its output in both types.
    attention = attention * width
    ffn = ffn * width * (0.75 if layout.eight_bits else 1)
    match layout.activation_checkpointing:
        case "block":
            return h * width, attention + ffn
        case "attention":
            return h * width + ffn, attention
    return attention + ffn, 0.0
