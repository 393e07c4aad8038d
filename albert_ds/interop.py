"""Our weights under Hugging Face's names and back, and every folder that holds weights.

One table of name pairs, read both ways. What the table cannot say:

- Hugging Face always has the map E -> H. Where E = H ours has none: an identity is written, and only
  an identity is read; another map there has no place in our model.
- Hugging Face shares whole layers. What `attention` and `ffn` share is written once a layer; read
  are blocks as shared that are equal, bit for bit, in all layers.
- The decoder is tied to the word embedding: none of its tensors is written, and where a file has
  them they must be equal to what they are tied to.
- The released base, large and xlarge files have a pooler and no sentence head: one of zeros is read.

Files are read as tensors alone; nothing in them is executed.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.errors import UserError
from albert_ds.model.config import ModelConfig, share

if TYPE_CHECKING:  # importing torch takes seconds, which --help does not have
    from torch import Tensor

Weights = dict[str, "Tensor"]

# Modules: ours, theirs. {} is the number of a block here and of a group there; each module has a
# weight and a bias, save the embeddings (no bias) and the MLM head's own bias.
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
# Config fields: ours -> theirs, type. Their second dropout, `sharing` and `pair_head` are worked out.
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
IDENTITY = "albert.encoder.embedding_hidden_mapping_in"
TIED = {
    "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
    "predictions.decoder.bias": "predictions.bias",
}
OURS = "weights.safetensors"
THEIRS = ("model.safetensors", "pytorch_model.bin")


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
    import torch

    hf_config = {
        "architectures": ["AlbertForPreTraining" if config.pair_head else "AlbertForMaskedLM"],
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
    hf_state = {theirs: state[ours] for ours, theirs in name_pairs(config)}
    if config.embedding_size == config.hidden_size:
        hf_state[f"{IDENTITY}.weight"] = torch.eye(config.hidden_size)
        hf_state[f"{IDENTITY}.bias"] = torch.zeros(config.hidden_size)
    return hf_config, hf_state


def from_hf(hf_config: dict, hf_state: Weights, where: str) -> tuple[ModelConfig, Weights]:
    """A Hugging Face config.json and state dict, of AlbertForPreTraining or -MaskedLM, as ours.

    Tensors become fp32. Raises UserError, with `where`, for what our model cannot compute.
    """
    import torch

    buffers = {f"albert.embeddings.{name}" for name in ("position_ids", "token_type_ids")}
    state = {name: x.float() for name, x in hf_state.items() if name not in buffers}
    config = _read_hf_config(hf_config, pair_head="albert.pooler.weight" in state, where=where)
    for name, source in TIED.items():
        copy = state.pop(name, None)
        if copy is not None and not torch.equal(copy, state.get(source, copy)):
            raise UserError(f"{where}: {name} differs from {source}, to which it must be tied")
    if config.embedding_size == config.hidden_size:
        eye, zeros = torch.eye(config.hidden_size), torch.zeros(config.hidden_size)
        found = [state.pop(f"{IDENTITY}.{leaf}", torch.empty(0)) for leaf in ("weight", "bias")]
        if not (torch.equal(found[0], eye) and torch.equal(found[1], zeros)):
            raise UserError(f"{where}: {IDENTITY} must be an identity where E = H")
    if config.pair_head and not any(name.startswith("sop_classifier.") for name in state):
        logging.warning("%s: no sentence head (sop_classifier): it starts as zeros", where)
        state["sop_classifier.classifier.weight"] = torch.zeros(2, config.hidden_size)
        state["sop_classifier.classifier.bias"] = torch.zeros(2)
    pairs = dict(name_pairs(config))
    _check_names(state, pairs.values(), where)
    ours = {our_name: state[their_name] for our_name, their_name in pairs.items()}
    config, ours = _recognise_sharing(config, ours)
    _check_shapes(config, ours, where)
    return config, ours


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
        logging.warning("equal %s blocks in all layers: read as sharing %s", shared, sharing)
        config = replace(config, sharing=sharing)
    return config, {our_name: state[our_name] for our_name, _ in name_pairs(config)}


def locate(folder: Path) -> tuple[Path, Path]:
    """The (root, weights file) of a run, of one of its checkpoints, or of a Hugging Face folder.

    The root holds config.json and spiece.model. Raises UserError where there are no weights.
    """
    latest = folder / "checkpoints" / "latest"
    if latest.is_file():
        return folder, folder / "checkpoints" / Path(latest.read_text().strip()).name / OURS
    if (folder / OURS).is_file():
        return folder.parent.parent, folder / OURS
    for name in THEIRS:
        if (folder / name).is_file():
            return folder, folder / name
    raise UserError(f"{folder}: neither a run (checkpoints/latest) nor a folder with {THEIRS[0]}")


def read_weights(folder: Path) -> tuple[ModelConfig, Weights]:
    """The config and fp32 weights of a run (its newest checkpoint), a checkpoint or an HF folder."""
    root, path = locate(folder)
    config = read_json(root / "config.json")
    state = _read_tensors(path)
    if path.name != OURS:
        return from_hf(config, state, str(folder))
    try:
        model = ModelConfig(**config["model"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{root / 'config.json'}: no model we know: {error}") from None
    _check_shapes(model, state, str(path))
    return model, state


def read_json(path: Path) -> dict:
    """A JSON object; UserError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object")
    return content


def _read_tensors(path: Path) -> Weights:
    import pickle

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError) as error:
        raise UserError(f"{path}: not a file of tensors: {str(error).splitlines()[0]}") from None


def _check_names(found: Iterable[str], expected: Iterable[str], where: str) -> None:
    for name in sorted(set(expected) - set(found)):
        raise UserError(f"{where}: no tensor {name}")
    for name in sorted(set(found) - set(expected)):
        raise UserError(f"{where}: a tensor that this model does not have: {name}")


def _check_shapes(config: ModelConfig, state: Weights, where: str) -> None:
    import torch

    from albert_ds.model.albert import AlbertForPretraining

    with torch.device("meta"):
        model = AlbertForPretraining(config).state_dict()
    _check_names(state, model, where)
    for name, tensor in model.items():
        found, expected = tuple(state[name].shape), tuple(tensor.shape)
        if found != expected:
            raise UserError(f"{where}: {name} is {found}: config.json makes it {expected}")
