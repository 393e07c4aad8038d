"""Depth that grows while training: `--depth-schedule 3@0,6@40%,12@70%`.

The layers share their parameters, so early steps may run fewer of them: nothing is added when the
depth changes, and the moments go on. The depth is a function of the number of finished steps.
"""

from functools import cache

from albert_ds.cli import Number
from albert_ds.errors import UserError
from albert_ds.model.config import ModelConfig
from albert_ds.schedules import Schedule, cut, read_schedule

LAYERS = Number(low=1, high=1 << 20, whole=True)


@cache
def read_depths(model: ModelConfig, schedule: str | None, num_steps: int) -> Schedule:
    """The layers of every step of a run; the last part runs the whole model.

    Raises UserError if a part would not use every parameter, or the last is not the model.
    """
    name, text = "--depth-schedule", schedule or str(model.num_layers)
    depths = read_schedule(name, text, num_steps, LAYERS)
    if depths.values[-1] != model.num_layers:
        raise UserError(f"{name} {text}: must end with --num-layers {model.num_layers}")
    try:
        for layers in depths.values:
            model.at_depth(layers)
    except UserError as error:
        raise UserError(f"{name} {text}: {error}") from None
    return depths


def list_depths(
    model: ModelConfig, schedule: str | None, num_steps: int
) -> list[tuple[ModelConfig, int]]:
    """The model of each part of a run, and its number of steps."""
    depths = read_depths(model, schedule, num_steps)
    return [(model.at_depth(depths.at(begin)), steps) for begin, steps in cut([depths], num_steps)]


def model_at(model: ModelConfig, schedule: str | None, num_steps: int, step: int) -> ModelConfig:
    """The model that the step after `step` finished ones runs."""
    return model.at_depth(read_depths(model, schedule, num_steps).at(step))
