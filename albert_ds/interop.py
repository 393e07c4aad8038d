"""Every folder that holds weights, read alike: a run, one of its checkpoints, or Hugging Face's.

A run is one of pretraining, or of fine-tuning: then its best evaluation is what is read.

Files are read as tensors alone; nothing in them is executed.
"""

import json
import zlib
from dataclasses import fields
from pathlib import Path

from albert_ds.errors import DamagedData, UserError
from albert_ds.model.config import ModelConfig, share
from albert_ds.model.head_config import HeadConfig
from albert_ds.model.hugging_face import (
    ENCODER,
    Weights,
    build_shapes,
    check_shapes,
    from_hf,
    name_pairs,
)
from albert_ds.model.hugging_face import to_hf as to_hf

OURS = "weights.safetensors"
BEST = Path("checkpoints") / "best"  # of a fine-tuning run, by its dev set
THEIRS = ("model.safetensors", "pytorch_model.bin")


def locate(folder: Path) -> tuple[Path, Path]:
    """The (root, weights file) of a run, of one of its checkpoints, or of a Hugging Face folder.

    The root holds config.json and spiece.model. Raises UserError where there are no weights.
    """
    if (folder / BEST / OURS).is_file():
        return folder, folder / BEST / OURS
    latest = folder / "checkpoints" / "latest"
    if latest.is_file():
        return folder, folder / "checkpoints" / Path(latest.read_text().strip()).name / OURS
    if (folder / OURS).is_file():
        return folder.parent.parent, folder / OURS
    for name in THEIRS:
        if (folder / name).is_file():
            return folder, folder / name
    seeds = ", ".join(path.name for path in sorted(folder.glob("seed-*")))
    hint = f"; name one of {seeds} in it" if seeds else ""
    raise UserError(
        f"{folder}: neither a run (checkpoints/latest) nor a folder with {THEIRS[0]}{hint}"
    )


def read_weights(folder: Path) -> tuple[ModelConfig, Weights]:
    """The config and fp32 weights of a run (its newest checkpoint), a checkpoint or an HF folder.

    Raises UserError naming the file, and DamagedData where a checkpoint fails its own checksum.
    """
    root, path = locate(folder)
    if path.name != OURS:
        return from_hf(read_json(root / "config.json"), _read_tensors(path), str(folder))
    config, head, state = read_ours(folder)
    if head is not None:
        raise UserError(f"{folder}: fine-tuned ({head.kind}): it has no pretraining heads")
    return config, state


def read_encoder(folder: Path) -> tuple[ModelConfig, Weights]:
    """The config and fp32 encoder (with its pooler, if it has one) of anything `locate` finds."""
    root, path = locate(folder)
    if path.name != OURS:
        config = read_json(root / "config.json")
        return from_hf(config, _read_tensors(path), str(folder), encoder_only=True)
    config, _, state = read_ours(folder)
    return config, {name: x for name, x in state.items() if name.startswith(ENCODER)}


def read_ours(folder: Path) -> tuple[ModelConfig, HeadConfig | None, Weights]:
    """The config, the head of a fine-tuned model, and the weights of a run or checkpoint."""
    root, path = locate(folder)
    config = read_json(root / "config.json")
    _check_sum(path)
    state = _read_tensors(path)
    try:
        model, head = ModelConfig(**config["model"]), None
        if "head" in config:
            head = HeadConfig(**config["head"] | {"labels": tuple(config["head"]["labels"])})
    except (KeyError, TypeError) as error:
        raise UserError(f"{root / 'config.json'}: no model we know: {error}") from None
    check_shapes(state, build_shapes(model, head), str(path))
    return model, head, state


def read_initial_weights(folder: Path, config: ModelConfig) -> Weights:
    """The weights that a new run of `config` starts from; UserError if they cannot be mapped.

    Depth and sharing may differ: a layer takes the blocks of the layer at the same relative depth,
    which for equal depths is the same layer. A pooler and sentence head that the run does not have
    are left behind.
    """
    found, state = read_weights(folder)
    # They have no shapes, or are compared below.
    free = ("dropout", "initializer_range", "sharing", "num_layers", "pair_head")
    for name in [field.name for field in fields(config) if field.name not in free]:
        ours, theirs = getattr(config, name), getattr(found, name)
        if ours != theirs:
            raise UserError(f"--init-from {folder}: its {name} is {theirs}, this run's is {ours}")
    if config.pair_head and not found.pair_head:
        raise UserError(f"--init-from {folder}: has no sentence head: --objective must be none")
    origin = _find_origins(found, config, folder)
    # Copies, since several new blocks may start from one old block and then go their own ways.
    return {ours: state[_rename_block(ours, origin)].clone() for ours, _ in name_pairs(config)}


def _find_origins(old: ModelConfig, new: ModelConfig, folder: Path) -> dict[tuple[str, int], int]:
    """For every (kind, index) of a new block the index of the old block that it starts from."""
    origin: dict[tuple[str, int], int] = {}
    old_plan = share(old.sharing, old.num_layers)
    for layer, blocks in enumerate(share(new.sharing, new.num_layers)):
        sources = old_plan[layer * old.num_layers // new.num_layers]
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


def read_json(path: Path) -> dict:
    """A JSON object; UserError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object")
    return content


def _check_sum(path: Path) -> None:
    record = path.with_name("state.json")
    if not record.is_file():  # an imported checkpoint has none
        return
    expected, found = read_json(record)["crc32"][path.name], 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found = zlib.crc32(block, found)
    if found != expected:
        raise DamagedData(f"{path}: its checksum is not that in {record.name}")


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
