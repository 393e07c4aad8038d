"""Our weights under Hugging Face's names, and back: one table of pairs, read both ways.

What the table cannot say:

- Hugging Face always has the map E -> H. Where E = H ours has none: an identity is written, and
  only an identity is read; another map there has no place in our model.
- Hugging Face shares whole layers. What `attention` and `ffn` share is written once a layer; blocks
  that are equal, bit for bit, in all layers are read as shared.
- The decoder is tied to the word embedding: its tensors are not written, and where a file has them
  they must equal what they are tied to.
- Released files have a pooler and may lack the sentence head (sop_classifier): then it is zeros.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from albert_ds.errors import UserError
from albert_ds.model.config import ModelConfig, share
from albert_ds.model.head_config import HeadConfig

if TYPE_CHECKING:  # importing torch takes seconds, which --help does not have
    from torch import Tensor

Weights = dict[str, "Tensor"]

# Modules: ours, theirs; ATTENTION and FFN are named within a block of ours and a layer of theirs.
# Each has a weight and a bias, but for TABLES: a weight.
TABLES = (
    ("albert.embeddings.word", "albert.embeddings.word_embeddings"),
    ("albert.embeddings.token_type", "albert.embeddings.token_type_embeddings"),
    ("albert.embeddings.position", "albert.embeddings.position_embeddings"),
)
MODULES = (
    ("albert.embeddings.layer_norm", "albert.embeddings.LayerNorm"),
    ("albert.embeddings.projection", "albert.encoder.embedding_hidden_mapping_in"),
    ("albert.pooler", "albert.pooler"),
    ("mlm_head.transform", "predictions.dense"),
    ("mlm_head.layer_norm", "predictions.LayerNorm"),
    ("pair_head", "sop_classifier.classifier"),
)
ATTENTION = (
    ("self_attention.query", "attention.query"),
    ("self_attention.key", "attention.key"),
    ("self_attention.value", "attention.value"),
    ("self_attention.output", "attention.dense"),
    ("layer_norm", "attention.LayerNorm"),
)
FFN = (
    ("feed_forward.up", "ffn"),
    ("feed_forward.down", "ffn_output"),
    ("layer_norm", "full_layer_layer_norm"),
)
# Config fields: ours -> theirs, type. Their other dropout, sharing and pair_head are worked out.
FIELDS = {
    "vocab_size": ("vocab_size", int),
    "embedding_size": ("embedding_size", int),
    "hidden_size": ("hidden_size", int),
    "num_layers": ("num_hidden_layers", int),
    "num_heads": ("num_attention_heads", int),
    "ffn_size": ("intermediate_size", int),
    "max_position_embeddings": ("max_position_embeddings", int),
    "type_vocab_size": ("type_vocab_size", int),
    "dropout": ("hidden_dropout_prob", int | float),
    "initializer_range": ("initializer_range", int | float),
    "layer_norm_eps": ("layer_norm_eps", int | float),
}
ENCODER = "albert."
IDENTITY = "albert.encoder.embedding_hidden_mapping_in"
TIED = {
    "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}


def name_pairs(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Every (our name, their name) of a model; ours repeats where Hugging Face cannot share."""
    for ours, theirs in TABLES:
        yield f"{ours}.weight", f"{theirs}.weight"
    yield "mlm_head.bias", "predictions.bias"
    absent = set()
    if config.embedding_size == config.hidden_size:
        absent.add("albert.embeddings.projection")
    if not config.pair_head:
        absent |= {"albert.pooler", "pair_head"}
    modules = [pair for pair in MODULES if pair[0] not in absent]
    for group, (attention, ffn) in enumerate(distinct_layers(config)):
        layer = f"albert.encoder.albert_layer_groups.{group}.albert_layers.0"
        for kind, index, table in (("attention", attention, ATTENTION), ("ffn", ffn, FFN)):
            modules += [(f"albert.encoder.{kind}.{index}.{a}", f"{layer}.{b}") for a, b in table]
    for ours, theirs in modules:
        for leaf in ("weight", "bias"):
            yield f"{ours}.{leaf}", f"{theirs}.{leaf}"


def distinct_layers(config: ModelConfig) -> list[tuple[int, int]]:
    """The distinct layers of a model in order: what Hugging Face calls its hidden groups."""
    return sorted(set(share(config.sharing, config.num_layers)))


def to_hf(config: ModelConfig, state: Weights) -> tuple[dict, Weights]:
    """Our weights as Hugging Face's (config.json as a dict, state dict).

    Loads as AlbertForPreTraining, or as AlbertForMaskedLM where there is no sentence head.
    """
    architecture = "AlbertForPreTraining" if config.pair_head else "AlbertForMaskedLM"
    hf_state = {theirs: state[ours] for ours, theirs in name_pairs(config)}
    return build_hf_config(config, architecture), hf_state | build_identity(config)


def build_hf_config(config: ModelConfig, architecture: str) -> dict:
    """Hugging Face's config.json of a model, which is to be loaded as `architecture`."""
    return {
        "architectures": [architecture],
        "model_type": "albert",
        **{theirs: getattr(config, ours) for ours, (theirs, _) in FIELDS.items()},
        "attention_probs_dropout_prob": config.dropout,
        "num_hidden_groups": len(distinct_layers(config)),
        "inner_group_num": 1,
        "hidden_act": "gelu_new",  # their name of the tanh form
        "classifier_dropout_prob": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def build_identity(config: ModelConfig) -> Weights:
    """The map that Hugging Face has even where E = H; nothing elsewhere."""
    import torch

    if config.embedding_size != config.hidden_size:
        return {}
    eye, zeros = torch.eye(config.hidden_size), torch.zeros(config.hidden_size)
    return {f"{IDENTITY}.weight": eye, f"{IDENTITY}.bias": zeros}


def from_hf(
    hf_config: dict, hf_state: Weights, where: str, *, encoder_only: bool = False
) -> tuple[ModelConfig, Weights]:
    """A Hugging Face config.json and state dict, of AlbertForPreTraining or -MaskedLM, as ours.

    `encoder_only` takes the encoder of any ALBERT there and leaves the heads behind. Tensors become
    fp32. Raises UserError, with `where`, for what our model cannot compute.
    """
    import torch

    buffers = {f"albert.embeddings.{name}" for name in ("position_ids", "token_type_ids")}
    prefix = ENCODER if encoder_only else ""
    state = {
        name: x.float()
        for name, x in hf_state.items()
        if name not in buffers and name.startswith(prefix)
    }
    config = _read_hf_config(hf_config, pair_head="albert.pooler.weight" in state, where=where)
    for name, source in TIED.items():
        copy = state.pop(name, None)
        if copy is not None and not torch.equal(copy, state.get(source, copy)):
            raise UserError(f"{where}: {name} differs from {source}, to which it must be tied")
    if config.embedding_size == config.hidden_size:
        for name, identity in build_identity(config).items():
            if not torch.equal(state.pop(name, torch.empty(0)), identity):
                raise UserError(f"{where}: {IDENTITY} must be an identity where E = H")
    lacks_pair_head = not any(name.startswith("sop_classifier.") for name in state)
    if config.pair_head and lacks_pair_head and not encoder_only:
        logging.getLogger(__name__).warning(
            "%s: no sentence head (sop_classifier): it starts as zeros", where
        )
        state["sop_classifier.classifier.weight"] = torch.zeros(2, config.hidden_size)
        state["sop_classifier.classifier.bias"] = torch.zeros(2)
    pairs = {ours: theirs for ours, theirs in name_pairs(config) if ours.startswith(prefix)}
    shapes = build_shapes(config)
    check_shapes(state, {theirs: shapes[ours] for ours, theirs in pairs.items()}, where)
    return _recognise_sharing(config, {ours: state[theirs] for ours, theirs in pairs.items()})


def _read_hf_config(hf_config: dict, *, pair_head: bool, where: str) -> ModelConfig:
    def read(name: str, kind=int):
        value = hf_config.get(name)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise UserError(f"{where}: config.json: {name} {value!r}: must be a number")
        return value

    def require(name: str, allowed: tuple) -> None:
        if hf_config.get(name) not in allowed:
            words = " or ".join(map(str, allowed))
            raise UserError(
                f"{where}: config.json: {name} {hf_config.get(name)!r}: must be {words}"
            )

    require("model_type", ("albert",))
    require("hidden_act", ("gelu_new", "gelu_pytorch_tanh"))  # "gelu" is the erf form
    require("inner_group_num", (1,))
    require("attention_probs_dropout_prob", (read("hidden_dropout_prob", int | float),))
    sizes = {ours: read(theirs, kind) for ours, (theirs, kind) in FIELDS.items()}
    groups, layers = read("num_hidden_groups"), sizes["num_layers"]
    sharing = {1: "all", layers: "none"}.get(groups, f"groups:{groups}") if layers > 1 else "all"
    try:
        return ModelConfig(**sizes, sharing=sharing, pair_head=pair_head)
    except UserError as error:
        raise UserError(f"{where}: config.json: {error}") from None


def _recognise_sharing(config: ModelConfig, state: Weights) -> tuple[ModelConfig, Weights]:
    import torch

    if config.sharing != "none":
        return config, state
    shared = []
    for kind in ("attention", "ffn"):
        first = f"albert.encoder.{kind}.0."
        leaves = [name.removeprefix(first) for name in state if name.startswith(first)]
        blocks = [f"albert.encoder.{kind}.{layer}." for layer in range(config.num_layers)]
        if all(torch.equal(state[b + x], state[first + x]) for b in blocks for x in leaves):
            shared.append(kind)
    if shared:
        sharing = "all" if len(shared) == 2 else shared[0]
        log = logging.getLogger(__name__)
        log.warning("%s equal in all layers: read as --sharing %s", " and ".join(shared), sharing)
        config = replace(config, sharing=sharing)
    kept = [our_name for our_name, _ in name_pairs(config) if our_name in state]
    return config, {our_name: state[our_name] for our_name in kept}


def build_shapes(config: ModelConfig, head: HeadConfig | None = None) -> dict[str, tuple]:
    """The shape of every tensor of a model, by name, without building any.

    Of the pretrained model, or with `head` of one fine-tuned for a task.
    """
    import torch

    from albert_ds.model.albert import AlbertForPretraining
    from albert_ds.model.task_heads import AlbertForTask

    with torch.device("meta"):
        model = AlbertForPretraining(config) if head is None else AlbertForTask(config, head)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_shapes(state: Weights, shapes: dict[str, tuple], where: str) -> None:
    """Raise UserError, with `where`, unless the tensors have exactly these names and shapes."""
    for name in sorted(state.keys() ^ shapes.keys()):
        problem = "is missing" if name in shapes else "belongs to another model than config.json's"
        raise UserError(f"{where}: {name} {problem}")
    for name, shape in shapes.items():
        found = tuple(state[name].shape)
        if found != shape:
            raise UserError(f"{where}: {name} is {found}: config.json makes it {shape}")
