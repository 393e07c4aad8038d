"""Learning rate as a pure function of the step: linear warm-up from 0, then one of three shapes.

linear  Falls on a straight line. As in the release (optimization.py; ALBERT paper 4.1) the line is
        counted from step 0, not from the end of the warm-up, so the rate steps down by
        `warmup_steps / num_steps` where the warm-up ends (0.001759 -> 0.001716 for 3,125 of 125,000
        steps).
cosine  Falls on half a cosine from the end of the warm-up on.
wsd     Stays at the peak, and falls on a straight line in the last steps: warm-up, stable, decay
        (MiniCPM). Until then the number of steps changes no rate.
"""

import math

SHAPES = ("linear", "cosine", "wsd")


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    num_steps: int,
    shape: str = "linear",
    final: float = 0.0,
    cooldown: float = 1.0,
) -> float:
    """Rate of the update that follows `step` finished updates; `final * peak` from `num_steps` on.

    cooldown: share of the steps in which wsd falls.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    left = max(0.0, 1 - step / num_steps)
    if shape == "wsd":
        left = min(1.0, max(0, num_steps - step) / max(1, round(cooldown * num_steps)))
    elif shape == "cosine" and left:
        left = (1 + math.cos(math.pi * (step - warmup_steps) / (num_steps - warmup_steps))) / 2
    return peak * (final + (1 - final) * left)
