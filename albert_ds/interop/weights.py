"""Read the weights of any folder that has them: a run, one of its checkpoints, or Hugging Face's.

Of a pretraining run the newest checkpoint is read, of a fine-tuning run the best one. Files are
read as tensors only; nothing in them is executed.
"""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from albert_ds.checkpoint.folder import BEST, STATE, WEIGHTS, find_damage
from albert_ds.errors import DamagedData, UserError
from albert_ds.interop.hugging_face import (
    ENCODER,
    Weights,
    check_shapes,
    from_hf,
)
from albert_ds.interop.hugging_face import to_hf as to_hf
from albert_ds.json_files import build, check, read_json
from albert_ds.model.config import HeadConfig, ModelConfig
from albert_ds.model.shapes import build_shapes

if TYPE_CHECKING:
    from albert_ds.data.vocab import Vocab
    from albert_ds.model.albert import AlbertForPretraining

HF_FILES = ("model.safetensors", "pytorch_model.bin")


def find_weights(folder: Path) -> tuple[Path, Path]:
    """The (root, weights file) of a run, of one of its checkpoints, or of a Hugging Face folder.

    The root holds config.json and spiece.model. Raises UserError where there are no weights.
    """
    if (folder / BEST / WEIGHTS).is_file():
        return folder, folder / BEST / WEIGHTS
    latest = folder / "checkpoints" / "latest"
    if latest.is_file():
        return folder, folder / "checkpoints" / Path(
            latest.read_text(errors="replace").strip()
        ).name / WEIGHTS
    if (folder / WEIGHTS).is_file():
        return folder.parent.parent, folder / WEIGHTS
    for name in HF_FILES:
        if (folder / name).is_file():
            return folder, folder / name
    seeds = ", ".join(path.name for path in sorted(folder.glob("seed-*")))
    hint = f"; name one of {seeds} in it" if seeds else ""
    raise UserError(
        f"{folder}: neither a run (checkpoints/latest) nor a folder with {HF_FILES[0]}{hint}"
    )


def name_weights(folder: Path) -> str:
    """What reports call the weights: RUN/step-N by its names, or that of a Hugging Face folder."""
    root, path = find_weights(folder.resolve())
    return f"{root.name}/{path.parent.name}" if path.name == WEIGHTS else root.name


def read_model_vocab(folder: Path) -> "Vocab":
    """The vocabulary of what `find_weights` finds: `spiece.model`, else Hugging Face's
    `tokenizer.json`, which alone is what transformers 5 writes.

    Raises UserError where it is not the one that config.json records.
    """
    from albert_ds.data.tokenizer_json import read_tokenizer_json
    from albert_ds.data.vocab import MODEL_NAME, TOKENIZER_NAME, read_vocab

    root, path = find_weights(folder)
    is_hf = path.name in HF_FILES and not (root / MODEL_NAME).is_file()
    if is_hf and (root / TOKENIZER_NAME).is_file():
        return read_tokenizer_json(root / TOKENIZER_NAME)
    vocab, config = read_vocab(root / MODEL_NAME), root / "config.json"
    recorded = read_json(config).get("vocab_sha256") if config.is_file() else None
    if recorded not in (None, vocab.sha256):
        raise UserError(
            f"{root / MODEL_NAME}: its sha256 is {vocab.sha256}, must be {recorded} of "
            f"{config.name}: the weights belong to another vocabulary"
        )
    return vocab


def check_vocab(folder: Path, vocab: "Vocab", name: str) -> None:
    """Raise UserError where the weights in `folder` lie beside another vocabulary than `vocab`."""
    from albert_ds.data.vocab import MODEL_NAME, TOKENIZER_NAME

    root, _ = find_weights(folder)
    if not any((root / file).is_file() for file in (MODEL_NAME, TOKENIZER_NAME)):
        return  # the weights alone do not say
    theirs = read_model_vocab(folder).pieces
    for number, (piece, other) in enumerate(zip(vocab.pieces, theirs, strict=False)):
        if piece != other:
            raise UserError(
                f"{name}: its vocabulary has the piece {other!r} as id {number}, that of the data "
                f"{piece!r}; they must be the same"
            )


def read_weights(folder: Path) -> tuple[ModelConfig, Weights]:
    """The config and fp32 weights of a run (its newest checkpoint), a checkpoint or an HF folder.

    Raises UserError naming the file, and DamagedData where a checkpoint fails its own checksum.
    """
    root, path = find_weights(folder)
    if path.name != WEIGHTS:
        return from_hf(read_json(root / "config.json"), _read_tensors(path), str(folder))
    config, head, state = read_native(folder)
    if head is not None:
        raise UserError(f"{folder}: a fine-tuned model ({head.kind}); it has no pretraining heads")
    return config, state


def read_model(folder: Path) -> "AlbertForPretraining":
    """The pretraining model of a run, a checkpoint or an HF folder: fp32, on the CPU."""
    import torch

    from albert_ds.model.albert import AlbertForPretraining

    config, weights = read_weights(folder)
    with torch.device("meta"):
        model = AlbertForPretraining(config)
    model.load_state_dict(weights, assign=True)
    return model


def read_encoder(folder: Path) -> tuple[ModelConfig, Weights]:
    """The config and fp32 encoder, with its pooler if there is one, of any folder of weights."""
    root, path = find_weights(folder)
    if path.name != WEIGHTS:
        config = read_json(root / "config.json")
        return from_hf(config, _read_tensors(path), str(folder), encoder_only=True)
    config, _, state = read_native(folder)
    return config, {name: x for name, x in state.items() if name.startswith(ENCODER)}


def read_native(folder: Path) -> tuple[ModelConfig, HeadConfig | None, Weights]:
    """The config, the head of a fine-tuned model, and the weights of a run or checkpoint."""
    root, path = find_weights(folder)
    config = read_json(root / "config.json")
    if (path.parent / STATE).is_file():  # an imported checkpoint has none
        problem = find_damage(path.parent, files=(WEIGHTS,))
        if problem is not None:
            raise DamagedData(f"{path.parent}: {problem}")
    state = _read_tensors(path)
    name = str(root / "config.json")
    check(config, {"model": dict}, name)
    model, head = build(ModelConfig, config["model"], f"{name}: model"), None
    if "head" in config:
        head = build(HeadConfig, config["head"], f"{name}: head")
        if head.reads_pooled != model.pair_head:
            raise UserError(f"{name}: pair_head must be {head.reads_pooled} for head {head.kind}")
    check_shapes(state, build_shapes(model, head), str(path))
    return model, head, state


def read_initial_weights(folder: Path, config: ModelConfig, seed: int = 0) -> Weights:
    """The weights that a new run of `config` starts from; UserError if they cannot be mapped.

    Depth and sharing may differ: a layer takes the blocks of the layer at the same relative depth,
    which for equal depths is the same layer. What layers have of their own is taken along; what the
    old ones do not have starts as nothing, from `seed`. A pooler and a sentence head are dropped
    where the new run has none.
    """
    found, state = read_weights(folder)
    # These have no shape, or are compared below.
    free = ("dropout", "initializer_range", "sharing", "per_layer", "num_layers", "pair_head")
    for name in [field.name for field in fields(config) if field.name not in free]:
        ours, theirs = getattr(config, name), getattr(found, name)
        if ours != theirs:
            raise UserError(f"--init-from {folder}: its {name} is {theirs}, this run's is {ours}")
    if config.pair_head and not found.pair_head:
        raise UserError(f"--init-from {folder}: has no sentence head: --objective must be none")
    if not {*found.per_layer.split(",")} - {"none"} <= {*config.per_layer.split(",")}:
        raise UserError(
            f"--init-from {folder}: has --per-layer {found.per_layer}, which a run with "
            f"--per-layer {config.per_layer} has no place for; allowed: the same, or more"
        )
    origin = _find_origins(found, config, folder)
    started = _start_own(config, seed)
    weights = {}
    for name in build_shapes(config):
        old = _rename_block(name, origin)
        if old not in state and name.endswith((".layer_norm.weight", ".layer_norm.bias")):
            old = _find_norm(old, found)  # its own norm starts as the shared one
        # Copies, because several new blocks may start from one old block and are trained apart.
        weights[name] = (state[old] if old in state else started[name]).clone()
    return weights


def _start_own(config: ModelConfig, seed: int) -> Weights:
    """The initial values of what layers have of their own, by name."""
    from albert_ds.model.albert import init_weights
    from albert_ds.model.per_layer import build_per_layer

    own = build_per_layer(config)
    init_weights(own, config.initializer_range, seed)
    return {f"albert.encoder.own.{name}": x for name, x in own.state_dict().items()}


def _find_norm(name: str, config: ModelConfig) -> str:
    """`encoder.own.3.ffn.layer_norm.bias` -> that of the block that layer 3 uses."""
    encoder, _, rest = name.partition("own.")
    layer, kind, leaf = rest.split(".", 2)
    block = config.plan[int(layer)][kind == "ffn"]
    return f"{encoder}{kind}.{block}.{leaf}"


def _find_origins(old: ModelConfig, new: ModelConfig, folder: Path) -> dict[tuple[str, int], int]:
    """For every (kind, index) of a new block the index of the old block that it starts from."""
    origin: dict[tuple[str, int], int] = {}
    for layer, blocks in enumerate(new.plan):
        origin["own", layer] = layer * old.num_layers // new.num_layers
        sources = old.plan[origin["own", layer]]
        for kind, block, source in zip(("attention", "ffn"), blocks, sources, strict=True):
            if origin.setdefault((kind, block), source) != source:
                raise UserError(
                    f"--init-from {folder}: has --sharing {old.sharing}, --num-layers "
                    f"{old.num_layers}; with --sharing {new.sharing}, --num-layers "
                    f"{new.num_layers} its {kind} blocks {origin[kind, block]} and {source} would "
                    "have to become one; allowed: a --sharing that keeps them apart"
                )
    return origin


def _rename_block(name: str, origin: dict[tuple[str, int], int]) -> str:
    """The old name of a new tensor: `encoder.ffn.3.` may have been `encoder.ffn.0.`"""
    encoder, found, rest = name.partition(".encoder.")
    if not found:
        return name
    kind, index, leaf = rest.split(".", 2)
    return f"{encoder}{found}{kind}.{origin[kind, int(index)]}.{leaf}"


def _read_tensors(path: Path) -> Weights:
    import pickle

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, SafetensorError, pickle.UnpicklingError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{path}: not a file of tensors: {first_line}") from None
    if not isinstance(content, dict) or not all(map(torch.is_tensor, content.values())):
        raise UserError(f"{path}: not a file of tensors: must be a state dict")
    return content
