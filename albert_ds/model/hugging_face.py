"""Our weights under Hugging Face's names, and back: one table of name pairs, read both ways.

Where the two formats differ:

- Hugging Face always has the map E -> H. If E = H ours has none: an identity is written, and read
  as none. Another square map is kept (`square_map`).
- Hugging Face's layers share all or nothing: what ours have of their own is folded into the
  weights of blocks, one a layer (`model/per_layer.py`).
- Hugging Face shares whole layers, in groups of neighbours of one size. Any other sharing is
  written with more groups, one a layer if need be, so shared blocks are repeated in the file.
  Blocks that are equal, bit for bit, are read as shared.
- The decoder is tied to the word embedding: its tensors are not written. Where a file has them,
  they must equal the embedding.
- Released files have a pooler and may lack the sentence head (sop_classifier): then it is zeros.
- The head of SQuAD 2.0 has no counterpart in Hugging Face and is refused.

Shapes: E embedding, H hidden, L layers, G groups of Hugging Face.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from albert_ds.base.cli import Range
from albert_ds.base.errors import UserError
from albert_ds.base.json_files import check
from albert_ds.model.config import ModelConfig
from albert_ds.model.per_layer import fold
from albert_ds.model.projections import list_projections
from albert_ds.model.shapes import build_shapes
from albert_ds.model.sharing import name_plan
from albert_ds.model.task_heads import HeadConfig

Weights = dict[str, Tensor]

# Modules: ours, theirs; those of blocks are in PROJECTIONS and NORMS. Each has a weight and a bias,
# but for TABLES: a weight.
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
NORMS = {"attention": "attention.LayerNorm", "ffn": "full_layer_layer_norm"}  # of a layer's blocks
# Config fields: ours -> theirs, range. Their other dropout, sharing and pair_head are derived.
FIELDS = {
    "vocab_size": ("vocab_size", Range(is_integer=True)),
    "embedding_size": ("embedding_size", Range(is_integer=True)),
    "hidden_size": ("hidden_size", Range(is_integer=True)),
    "num_layers": ("num_hidden_layers", Range(is_integer=True)),
    "num_heads": ("num_attention_heads", Range(is_integer=True)),
    "ffn_size": ("intermediate_size", Range(is_integer=True)),
    "max_position_embeddings": ("max_position_embeddings", Range(is_integer=True)),
    "type_vocab_size": ("type_vocab_size", Range(is_integer=True)),
    "dropout": ("hidden_dropout_prob", Range()),
    "initializer_range": ("initializer_range", Range()),
    "layer_norm_eps": ("layer_norm_eps", Range()),
}
# What a config.json of theirs must say.
SCHEMA = {
    "model_type": "albert",
    "hidden_act": ("gelu_new", "gelu_pytorch_tanh"),  # "gelu" is the erf form
    "inner_group_num": 1,
    "num_hidden_groups": Range(is_integer=True),
    "attention_probs_dropout_prob": Range(),  # the other's
    **dict(FIELDS.values()),
}
ENCODER = "albert."
IDENTITY = "albert.encoder.embedding_hidden_mapping_in"
TIED = {
    "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}


def name_pairs(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Every (our name, their name) of a model. Ours repeats if Hugging Face cannot share."""
    for our_name, hf_name in TABLES:
        yield f"{our_name}.weight", f"{hf_name}.weight"
    yield "mlm_head.bias", "predictions.bias"
    absent = set()
    if not config.has_map:
        absent.add("albert.embeddings.projection")
    if not config.pair_head:
        absent |= {"albert.pooler", "pair_head"}
    modules = [pair for pair in MODULES if pair[0] not in absent]
    for group, (attention, ffn) in enumerate(list_groups(config)):
        layer = f"albert.encoder.albert_layer_groups.{group}.albert_layers.0"
        for kind, index in (("attention", attention), ("ffn", ffn)):
            block = f"albert.encoder.{kind}.{index}"
            for name, part in list_projections(config.feed_forward).items():
                if part.block == kind:
                    our_name = f"{block}.{part.module}.{name}"
                    modules.append((our_name, f"{layer}.{part.hugging_face}"))
            modules.append((f"{block}.layer_norm", f"{layer}.{NORMS[kind]}"))
    for our_name, hf_name in modules:
        for leaf in ("weight", "bias"):
            yield f"{our_name}.{leaf}", f"{hf_name}.{leaf}"


def check_form(config: ModelConfig) -> None:
    """Raise UserError if a projection of ours has no place in a model of theirs."""
    for name, part in list_projections(config.feed_forward).items():
        if part.hugging_face is None:
            raise UserError(
                f"feed_forward {config.feed_forward}: Hugging Face's ALBERT has no place for its "
                f"{name} projection, so it cannot be exported"
            )


def list_groups(config: ModelConfig) -> list[tuple[int, int]]:
    """The (attention, ffn) block of each of Hugging Face's hidden groups, [G].

    Hugging Face's layer l uses group l * G // L, so G is the smallest divisor of L that expresses
    the sharing. G = L always does.
    """
    plan = config.plan
    sizes = range(len(plan), 0, -1)  # layers a group
    return next(
        plan[::size] for size in sizes if plan == [g for g in plan[::size] for _ in range(size)]
    )


def to_hf(config: ModelConfig, state: Weights) -> tuple[dict, Weights]:
    """A pretrained model in Hugging Face's form (config.json as a dict, state dict).

    Loads as AlbertForPreTraining, or as AlbertForMaskedLM if there is no sentence head.
    """
    check_form(config)
    architecture = "AlbertForPreTraining" if config.pair_head else "AlbertForMaskedLM"
    config, state = fold(config, state)
    hf_state = {hf_name: state[name] for name, hf_name in name_pairs(config)}
    return build_hf_config(config, architecture), hf_state | build_identity(config)


def task_to_hf(
    config: ModelConfig, head: HeadConfig, state: Weights, where: str
) -> tuple[dict, Weights]:
    """A fine-tuned model in Hugging Face's form (config.json as a dict, state dict).

    Raises UserError, with `where`, for a head that transformers does not have.
    """
    hf_head = head.row.hugging_face
    if hf_head is None:
        reason = head.row.not_exported or f"its head is {head.kind!r}"
        raise UserError(
            f"{where}: {reason}; Hugging Face has no such ALBERT. Exported are pretrained models "
            "and all other tasks"
        )
    check_form(config)
    config, state = fold(config, state)
    hf_config = build_hf_config(config, hf_head.architecture)
    hf_config |= {"classifier_dropout_prob": head.dropout, **hf_head.facts(head)}
    pairs = [pair for pair in name_pairs(config) if pair[0].startswith(ENCODER)]
    pairs += [(f"head.score.{leaf}", f"{hf_head.layer}.{leaf}") for leaf in ("weight", "bias")]
    return hf_config, {name: state[our_name] for our_name, name in pairs} | build_identity(config)


def build_hf_config(config: ModelConfig, architecture: str) -> dict:
    """Hugging Face's config.json of a model that loads as `architecture`."""
    return {
        "architectures": [architecture],
        "model_type": "albert",
        **{hf_name: getattr(config, name) for name, (hf_name, _) in FIELDS.items()},
        "attention_probs_dropout_prob": config.dropout,
        "num_hidden_groups": len(list_groups(config)),
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
    """Hugging Face's map E -> H as an identity if ours has none; empty elsewhere."""
    if config.has_map:
        return {}
    eye = torch.eye(config.hidden_size)
    zeros = torch.zeros(config.hidden_size)
    return {f"{IDENTITY}.weight": eye, f"{IDENTITY}.bias": zeros}


def from_hf(
    hf_config: dict,
    hf_state: Weights,
    where: str,
    *,
    encoder_only: bool,
    needs_mlm_head: bool = False,
) -> tuple[ModelConfig, Weights]:
    """Read config.json and the state dict of an AlbertForPreTraining, ForMaskedLM or AlbertModel.

    `encoder_only` reads the encoder of any ALBERT and leaves the heads out. Tensors become fp32.
    Raises UserError, with `where`, for what our model cannot compute, and if it `needs_mlm_head`
    for weights without that head, which else is drawn.
    """
    buffers = {f"albert.embeddings.{name}" for name in ("position_ids", "token_type_ids")}
    prefix = ENCODER if encoder_only else ""
    # An AlbertModel, as AutoModel and sentence-transformers save it, is the encoder itself.
    outer = "" if any(name.startswith(ENCODER) for name in hf_state) else ENCODER
    state = {
        name: x.float()
        for name, x in ((outer + name, x) for name, x in hf_state.items())
        if name not in buffers and name.startswith(prefix)
    }
    config = _read_hf_config(hf_config, pair_head="albert.pooler.weight" in state, where=where)
    one = config.dropout
    other = hf_config["attention_probs_dropout_prob"]
    if one != other and not encoder_only:  # fine-tuning sets its own
        raise UserError(
            f"{where}: config.json: attention_probs_dropout_prob {other}: must be {one}"
        )
    for name, source in TIED.items():
        copy = state.pop(name, None)
        if copy is not None and not torch.equal(copy, state.get(source, copy)):
            raise UserError(f"{where}: {name} differs from {source}, to which it must be tied")
    identity = build_identity(config)
    if all(torch.equal(state.get(name, x), x) for name, x in identity.items()):
        state = {name: x for name, x in state.items() if name not in identity}
    else:
        config = replace(config, square_map=True)
    lacks_pair_head = not any(name.startswith("sop_classifier.") for name in state)
    if config.pair_head and lacks_pair_head and not encoder_only:
        logging.getLogger(__name__).warning(
            "%s: no sentence head (sop_classifier): it starts as zeros", where
        )
        state["sop_classifier.classifier.weight"] = torch.zeros(2, config.hidden_size)
        state["sop_classifier.classifier.bias"] = torch.zeros(2)
    if not encoder_only and not any(name.startswith("predictions.") for name in state):
        if needs_mlm_head:
            raise UserError(f"{where}: no head for masked words (predictions); must have one")
        logging.getLogger(__name__).warning(
            "%s: no head for masked words (predictions): it starts from random weights", where
        )
        state |= _draw_mlm_head(config)
    pairs = {name: hf_name for name, hf_name in name_pairs(config) if name.startswith(prefix)}
    shapes = build_shapes(config)
    _check_shapes(state, {hf_name: shapes[name] for name, hf_name in pairs.items()}, where)
    return _recognise_sharing(config, {name: state[hf_name] for name, hf_name in pairs.items()})


def _draw_mlm_head(config: ModelConfig) -> Weights:
    """That of an encoder alone, by Hugging Face's names; the same every time."""
    width = config.embedding_size
    draw = torch.Generator().manual_seed(0)
    dense = torch.randn(width, config.hidden_size, generator=draw) * config.initializer_range
    return {
        "predictions.dense.weight": dense,
        "predictions.dense.bias": torch.zeros(width),
        "predictions.LayerNorm.weight": torch.ones(width),
        "predictions.LayerNorm.bias": torch.zeros(width),
        "predictions.bias": torch.zeros(config.vocab_size),
    }


def _read_hf_config(hf_config: dict, *, pair_head: bool, where: str) -> ModelConfig:
    check(hf_config, SCHEMA, f"{where}: config.json")
    sizes = {name: hf_config[hf_name] for name, (hf_name, _) in FIELDS.items()}
    groups, layers = hf_config["num_hidden_groups"], sizes["num_layers"]
    sharing = {1: "all", layers: "none"}.get(groups, f"groups:{groups}") if layers > 1 else "all"
    try:
        return ModelConfig(**sizes, sharing=sharing, pair_head=pair_head)
    except UserError as error:
        raise UserError(f"{where}: config.json: {error}") from None


def _recognise_sharing(config: ModelConfig, state: Weights) -> tuple[ModelConfig, Weights]:
    """Find out which blocks of a file's groups are shared, and keep one of each."""
    counts = zip(("attention", "ffn"), config.num_blocks, strict=True)
    owners = {kind: _find_owners(state, kind, count) for kind, count in counts}
    numbers = {
        kind: [sorted({*layers}).index(x) for x in layers] for kind, layers in owners.items()
    }
    sharing = name_plan([(numbers["attention"][a], numbers["ffn"][f]) for a, f in config.plan])
    if sharing == config.sharing:
        return config, state
    log = logging.getLogger(__name__)
    log.warning("blocks of different layers are equal: read as --sharing %s", sharing)
    kept = {}
    for name, tensor in state.items():
        encoder, middle, rest = name.partition(".encoder.")
        if middle:
            kind, block, leaf = rest.split(".", 2)
            if owners[kind][int(block)] != int(block):
                continue
            name = f"{encoder}{middle}{kind}.{numbers[kind][int(block)]}.{leaf}"
        kept[name] = tensor
    return replace(config, sharing=sharing), kept


def _find_owners(state: Weights, kind: str, count: int) -> list[int]:
    """For every block of this kind the first one that is equal, bit for bit."""
    blocks = [f"albert.encoder.{kind}.{number}." for number in range(count)]
    leaves = [name.removeprefix(blocks[0]) for name in state if name.startswith(blocks[0])]
    owners: list[int] = []
    for number, block in enumerate(blocks):
        equal = (
            first
            for first in sorted(set(owners))
            if all(torch.equal(state[block + x], state[blocks[first] + x]) for x in leaves)
        )
        owners.append(next(equal, number))
    return owners


def _check_shapes(state: Weights, shapes: dict[str, tuple], where: str) -> None:
    """Raise UserError, with `where`, unless they are these tensors, and finite."""
    for name in sorted(state.keys() ^ shapes.keys()):
        problem = "is missing" if name in shapes else "belongs to another model than config.json's"
        raise UserError(f"{where}: {name} {problem}")
    for name, shape in shapes.items():
        actual = tuple(state[name].shape)
        if actual != shape:
            raise UserError(f"{where}: {name} is {actual}: config.json makes it {shape}")
        if not state[name].isfinite().all():
            raise UserError(f"{where}: {name} is not finite (NaN or Inf)")
