"""The weights that a new run starts from: those of another model, of perhaps another depth."""

from dataclasses import fields

from torch import nn

from albert_ds.base.errors import UserError
from albert_ds.checkpoint.model_folder import ModelFolder
from albert_ds.model.albert import init_weights
from albert_ds.model.config import ModelConfig
from albert_ds.model.hugging_face import Weights
from albert_ds.model.per_layer import build_per_layer
from albert_ds.model.shapes import build_shapes
from albert_ds.model.sharing import Plan

Origins = dict[tuple[str, int], int]  # (kind, index) of a new block -> index of the old one


def find_origins(folder: ModelFolder, config: ModelConfig) -> Origins:
    """From which old block each block of a new run of `config` starts.

    Depth and sharing may differ: a layer takes the blocks of the layer at the same relative depth,
    which for equal depths is the same layer. If a block would so take two, the cores of loops count
    as run once. What a layer has of its own is that of the nearest layer with its blocks. Raises
    UserError if the weights do not fit the run.
    """
    where = f"--init-from {folder.path}"
    old = folder.config
    if folder.head is not None:
        raise UserError(
            f"{where}: a fine-tuned model ({folder.head.kind}); must be a pretrained one"
        )
    # These have no shape, or are compared below.
    free = ("dropout", "initializer_range", "sharing", "per_layer", "num_layers", "pair_head")
    for name in [field.name for field in fields(config) if field.name not in free]:
        value, expected = getattr(old, name), getattr(config, name)
        if value != expected:
            raise UserError(f"{where}: its {name} is {value}, this run's is {expected}")
    if not {*old.per_layer.split(",")} - {"none"} <= {*config.per_layer.split(",")}:
        raise UserError(
            f"{where}: has --per-layer {old.per_layer}, which a run with --per-layer "
            f"{config.per_layer} has no place for; allowed: the same, or more"
        )
    try:
        origins = map_blocks(old.plan, config.plan)
    except UserError as refused:
        try:
            origins = map_blocks(run_once(old).plan, run_once(config).plan)
        except UserError:
            raise UserError(
                f"{where}: has --sharing {old.sharing}, --num-layers {old.num_layers}; with "
                f"--sharing {config.sharing}, --num-layers {config.num_layers} {refused}; "
                "allowed: a --sharing that keeps them apart"
            ) from None
    own: Origins = {}
    for layer, (attention, ffn) in enumerate(config.plan):
        blocks = origins["attention", attention], origins["ffn", ffn]
        place = layer * old.num_layers // config.num_layers
        candidates = [n for n, used in enumerate(old.plan) if used == blocks]
        own["own", layer] = min(candidates, key=lambda n: abs(n - place))
    return origins | own


def run_once(config: ModelConfig) -> ModelConfig:
    """The same blocks with the core of a loop run once; other patterns as they are."""
    is_loop = config.sharing.startswith("loop:")
    return config.at_depth(max(config.num_blocks)) if is_loop else config


def map_blocks(old: Plan, new: Plan) -> Origins:
    """Each new block's old one: that of the layer at the same relative depth.

    Raises UserError if it would be two.
    """
    origins: Origins = {}
    for layer, blocks in enumerate(new):
        sources = old[layer * len(old) // len(new)]
        for kind, block, source in zip(("attention", "ffn"), blocks, sources, strict=True):
            if origins.setdefault((kind, block), source) != source:
                raise UserError(
                    f"its {kind} blocks {origins[kind, block]} and {source} would have to become "
                    "one"
                )
    return origins


def read_initial_weights(folder: ModelFolder, config: ModelConfig, seed: int = 0) -> Weights:
    """The weights that a new run of `config` starts from; UserError if they do not fit.

    What layers have of their own is taken along, and so are a pooler and a sentence head. What the
    new run does not have is dropped; what the old one does not have is initialised from `seed`.
    """
    origins = find_origins(folder, config)
    state = folder.read_weights()
    new = {"albert.encoder.own": build_per_layer(config)}
    if config.pair_head and not folder.config.pair_head:
        new["albert.pooler"] = nn.Linear(config.hidden_size, config.hidden_size)
        new["pair_head"] = nn.Linear(config.hidden_size, 2)
    started = {}
    for name, module in new.items():
        init_weights(module, config.initializer_range, seed)
        started |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
    weights = {}
    for name in build_shapes(config):
        old = name
        front, is_encoders, rest = name.partition(".encoder.")
        if is_encoders:  # `encoder.ffn.3.` may have been `encoder.ffn.0.`
            kind, number, leaf = rest.split(".", 2)
            index = origins[kind, int(number)]
            old = f"{front}.encoder.{kind}.{index}.{leaf}"
            if old not in state and leaf.endswith(("layer_norm.weight", "layer_norm.bias")):
                # A norm of the layer's own starts as that of the block which the layer uses.
                kind, leaf = leaf.split(".", 1)
                block = folder.config.plan[index][kind == "ffn"]
                old = f"{front}.encoder.{kind}.{block}.{leaf}"
        # Copies, because several new blocks may start from one old block and are trained apart.
        weights[name] = (state[old] if old in state else started[name]).clone()
    return weights
