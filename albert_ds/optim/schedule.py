"""Learning rate as a pure function of the step (ALBERT paper 4.1, the release's optimization.py).

Linear warm-up from 0, then polynomial decay to 0. As in the release the decay is counted from step
0, not from the end of the warm-up, so the rate steps down by `warmup_steps / num_steps` where the
warm-up ends (0.001759 -> 0.001716 for 3,125 of 125,000 steps).
"""


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, num_steps: int, power: float = 1.0
) -> float:
    """Rate of the update that follows `step` finished updates; 0 from `num_steps` on."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    return peak * max(0.0, 1 - step / num_steps) ** power
