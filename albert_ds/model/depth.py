"""Depth that changes while training: `--depth-schedule 3@0,6@40%,12@70%`, or drawn: `2-6@0`.

The layers share their blocks, so a step may run fewer of them: nothing is added when the depth
changes, and the moments go on. What a layer that does not run has of its own waits as it is. The
depth is a function of the seed and the number of finished steps.
"""

import argparse
import hashlib
from contextlib import suppress
from functools import cache

from albert_ds.base.cli import Range, integer
from albert_ds.base.errors import UserError
from albert_ds.base.schedules import Schedule, read_schedule
from albert_ds.model.config import ModelConfig

LAYERS = integer(1, 10_000)


class Depths(tuple[int, ...]):
    """Numbers of layers, ascending, of which a step runs one: most often a single one."""

    def __str__(self) -> str:
        return str(self[0]) if len(self) == 1 else f"{self[0]}-{self[-1]}"


@cache
def read_depths(model: ModelConfig, schedule: str | None, num_steps: int) -> Schedule:
    """The `Depths` of every step of a run; the last part runs the whole model, at times at least.

    Raises UserError if a part would not use every block, or the last does not run all layers.
    """
    name = "--depth-schedule"
    text = schedule or str(model.num_layers)

    def read(typed: str) -> Depths:
        try:
            return find_depths(model, *read_span(typed))
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    depths = read_schedule(name, text, num_steps, read)
    if depths.values[-1][-1] != model.num_layers:
        raise UserError(f"{name} {text}: must end with --num-layers {model.num_layers}")
    return depths


def read_span(text: str) -> tuple[int, int]:
    """The ends of `2-6`, or those of `4`, which are one; ArgumentTypeError for anything else."""
    low, is_span, high = text.partition("-")
    first = int(LAYERS(low))
    last = int(LAYERS(high if is_span else low))
    if first > last:
        raise argparse.ArgumentTypeError(f"{text}: must be the smaller depth first")
    return first, last


def find_depths(model: ModelConfig, first: int, last: int) -> Depths:
    """The depths between two which use the same blocks; UserError unless these two do."""
    model.at_depth(first), model.at_depth(last)
    return list_depths(model, first, last)


def list_depths(model: ModelConfig, first: int, last: int) -> Depths:
    """The depths from `first` to `last` which use the same blocks; there may be none."""
    depths = []
    for layers in range(first, last + 1):
        with suppress(UserError):
            depths.append(model.at_depth(layers).num_layers)
    return Depths(depths)


def draw_depth(depths: Depths, seed: int, step: int) -> int:
    """The same one on every rank and after every resume; each is as likely as another."""
    drawn = hashlib.sha256(f"depth {seed} {step}".encode()).digest()
    return depths[int.from_bytes(drawn[:8], "big") % len(depths)]


def read_exits(model: ModelConfig, text: str | None) -> dict[int, float]:
    """The layers of --exit-losses, and the weight of the MLM loss after each; none for None.

    Raises UserError for what is no such list, and if states between layers are no layer's output.
    """
    exits: dict[int, float] = {}
    where = f"--exit-losses {text}"
    for word in text.split(",") if text is not None else ():
        layer, is_weighted, weight = word.partition(":")
        try:
            number = integer(1, model.num_layers - 1)(layer)
            value = Range(gt=0, le=1e3)(weight if is_weighted else "1")
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{where}: {word!r}: {error}; LAYER or LAYER:WEIGHT") from None
        if number in exits:
            raise UserError(f"{where}: names layer {number} twice")
        exits[int(number)] = value
    if exits and model.has_per_layer("layer.input"):
        raise UserError(
            f"{where}: not with --per-layer {model.per_layer}, which changes the state between two "
            "layers"
        )
    return exits
