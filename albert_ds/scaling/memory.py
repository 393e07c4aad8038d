"""What a rank's memory holds at its fullest, counted from what the program keeps.

Three moments compete: the MLM head's scores beside every layer's activations, the last layer's
backward beside them, and the optimizer's temporaries when the activations are gone. All stand on
what lives from step to step: weights, master weights and both moments. Bytes a parameter were
counted on DeepSpeed's optimizers and this project's LAMB; tools/memory_bench.py measures them.
"""

from dataclasses import dataclass

from albert_ds.scaling.layout import Layout

CHUNK_ROWS = 4096  # masked positions whose scores exist at once (model/heads.py)
SCORE_BYTES = 12  # softmax's output, the gradient of the loss and that of the scores, in fp32


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesAParameter:
    """Of a rank: a pair is for each parameter, and for each that falls to its share of DP ranks."""

    lives: tuple[float, float]  # from step to step
    gradients: tuple[float, float]  # summed between passes, where not in `lives`
    bucket: float  # what is reduced, from the start of the last backward pass on
    update: tuple[float, float]  # beyond `lives` while the optimizer steps, gradients among it


# Lives: weights in the passes' type, fp32 masters and two moments; in bf16 ZeRO-1 also keeps the
# gradients' fp32 sum, and ZeRO-3 another share. Update: gradients, the bucket they are reduced in,
# LAMB's update.
STATES = {
    ("fp32", 0): BytesAParameter(lives=(12, 0), gradients=(4, 0), bucket=0, update=(8, 0)),
    ("fp32", 1): BytesAParameter(lives=(4, 12), gradients=(4, 0), bucket=4, update=(4, 8)),
    ("bf16", 1): BytesAParameter(lives=(6, 12), gradients=(2, 0), bucket=0, update=(2, 4)),
    ("bf16", 2): BytesAParameter(lives=(2, 12), gradients=(0, 4), bucket=2, update=(8, 4)),
    ("bf16", 3): BytesAParameter(lives=(4, 18), gradients=(0, 4), bucket=2, update=(4, 4)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank at the fullest moment of a step."""

    lives: float  # weights, masters, moments
    activations: float  # kept for backward
    head: float  # scores of the vocabulary, and their gradients
    backward: float  # of the last layer, with what is computed again
    gradients: float  # already summed when the last pass runs, and the bucket
    update: float  # the optimizer's temporaries

    @property
    def peak(self) -> float:
        in_a_pass = self.gradients + self.activations + max(self.head, self.backward)
        return self.lives + max(in_a_pass, self.update)


def predict_memory(layout: Layout, *, on_cuda: bool = True) -> Memory:
    """Bytes of the fullest rank. On a CPU attention keeps one copy more, and no dropout is counted.

    Raises KeyError for a precision and ZeRO stage that no shipped configuration has.
    """
    states, model = STATES[states_key(layout)], layout.model
    parameters, replicas = layout.parameters, layout.data_parallel

    def held(pair: tuple[float, float]) -> float:
        return parameters * (pair[0] + pair[1] / replicas)

    width, tokens = layout.weight_bytes, layout.tokens_a_pass
    rows = min(layout.masked_a_pass, CHUNK_ROWS)
    kept, again = bytes_a_token(layout, on_cuda=on_cuda)
    # Of a token that nobody reads the last layer has its input, key and value.
    unread = tokens - layout.read_a_pass
    spared = unread * (kept + again - (1 + 2 / layout.tensor_parallel) * model.hidden_size * width)
    inner = model.ffn_size // layout.tensor_parallel
    matrix = model.hidden_size * inner * width
    word = model.vocab_size * model.embedding_size * width
    # A block's gradients take the place of its last layer's activations, and can be larger.
    growth = max(0.0, layout.block_parameters * width - tokens * (kept + again) + spared)
    # At ZeRO-0 the norm of the gradients is taken in float64, tensor by tensor.
    norm = 4 * parameters + 4 * max(word, matrix)
    return Memory(
        lives=held(states.lives),
        activations=tokens * (model.num_layers * kept + 2 * model.hidden_size * width)
        - max(0.0, spared - unread * again),
        head=rows * model.vocab_size * SCORE_BYTES,
        backward=word + matrix + 2 * tokens * inner * width + tokens * again + growth,
        gradients=held(states.gradients) * (layout.accumulation > 1) + parameters * states.bucket,
        update=max(held(states.update), 0 if layout.zero else norm),
    )


def states_key(layout: Layout) -> tuple[str, int]:
    return ("fp32" if layout.precision == "fp32" else "bf16", layout.zero)


def bytes_a_token(layout: Layout, *, on_cuda: bool) -> tuple[float, float]:
    """What a layer keeps of a token, and what its backward pass computes again."""
    model, tp, width = layout.model, layout.tensor_parallel, layout.weight_bytes
    h, f = model.hidden_size, model.ffn_size
    copies = 4 if on_cuda else 5  # query, key, value, their mix; on a CPU the mix once more
    attention = 2 * h + copies * h / tp  # its input and its sum before LayerNorm
    ffn = 2 * h + 2 * f / tp  # likewise, with the inner layer before and after GELU
    masks = 0 if width == 4 or not model.dropout else h  # a byte an element
    attention, ffn = attention * width + masks, ffn * width + masks
    match layout.activation_checkpointing:
        case "block":
            return h * width, attention + ffn
        case "attention":
            return h * width + ffn, attention
    return attention + ffn, 0.0
