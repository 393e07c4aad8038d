"""What ends a run that goes wrong by itself: gradients that stay infinite, replicas that drift."""

from pathlib import Path

from albert_ds.errors import Diverged
from albert_ds.parallel.tensor import find_drift
from albert_ds.runtime.checkpoint import describe_saved
from albert_ds.runtime.engine import Engine

# A gradient that is not finite skips its step; fp16 needs up to 17 of these to find its scale.
MAX_SKIPPED_IN_A_ROW = 20
DRIFT_CHECK_EVERY = 100  # steps


def check_health(engine: Engine, *, step: int, skipped_in_a_row: int, output: Path) -> None:
    """Raise Diverged after too many skipped steps; see now and then that replicas are bit-equal.

    Collective over tensor-parallel peers.
    """
    if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise Diverged(
            f"the gradient was not finite {skipped_in_a_row} steps in a row, up to step {step}; "
            f"{describe_saved(output)}"
        )
    if step % DRIFT_CHECK_EVERY == 0:
        drifted = find_drift(engine.deepspeed.module, engine.mesh)
        assert not drifted, f"replicas differ across tensor-parallel peers: {drifted}"
