"""Depth that grows while training: `--depth-schedule 3@0,6@40%,12@70%`.

The layers share their parameters, so early steps may run fewer of them: nothing is added when the
depth changes, and the moments go on. The depth is a function of the number of finished steps.
"""

from albert_ds.errors import UserError
from albert_ds.model.config import ModelConfig


def read_depths(schedule: str, num_steps: int) -> list[tuple[int, int]]:
    """(layers, step from which on they run) of each part of a schedule, the first from step 0.

    Raises UserError for what is no schedule.
    """
    parts: list[tuple[int, int]] = []
    for word in schedule.split(","):
        layers, _, start = word.partition("@")
        number = start.removesuffix("%")
        if not all(x.isascii() and x.isdecimal() for x in (layers, number)) or int(layers) < 1:
            raise UserError(
                f"--depth-schedule {schedule}: {word!r} must be LAYERS@STEP or LAYERS@SHARE%"
            )
        at = int(number) * num_steps // 100 if start.endswith("%") else int(number)
        if (at != 0) if not parts else (at <= parts[-1][1] or at >= num_steps):
            raise UserError(
                f"--depth-schedule {schedule}: {word!r} starts at step {at}; the first part must "
                f"start at 0, each other one after the one before and below --steps {num_steps}"
            )
        parts.append((int(layers), at))
    return parts


def list_depths(
    model: ModelConfig, schedule: str | None, num_steps: int
) -> list[tuple[ModelConfig, int]]:
    """The model of each part of a run, and its number of steps; the last part is the whole model.

    Raises UserError if a part would not use every parameter, or the last is not the model.
    """
    if schedule is None:
        return [(model, num_steps)]
    parts = read_depths(schedule, num_steps)
    if parts[-1][0] != model.num_layers:
        raise UserError(
            f"--depth-schedule {schedule}: must end with --num-layers {model.num_layers}"
        )
    ends = [start for _, start in parts[1:]] + [num_steps]
    try:
        return [
            (model.at_depth(layers), end - start)
            for (layers, start), end in zip(parts, ends, strict=True)
        ]
    except UserError as error:
        raise UserError(f"--depth-schedule {schedule}: {error}") from None


def count_layers(model: ModelConfig, schedule: str | None, num_steps: int, step: int) -> int:
    """The layers that the first `step` steps run, all together: the work of so much of a run."""
    total = 0
    for part, steps in list_depths(model, schedule, num_steps):
        total += part.num_layers * min(step, steps)
        step -= min(step, steps)
    return total


def model_at(model: ModelConfig, schedule: str | None, num_steps: int, step: int) -> ModelConfig:
    """The model that the step after `step` finished ones runs."""
    found = list_depths(model, schedule, num_steps)
    while len(found) > 1 and step >= found[0][1]:
        step -= found.pop(0)[1]
    return found[0][0]
