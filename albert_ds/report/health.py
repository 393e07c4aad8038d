"""Whether a run is still healthy: skipped steps, and replicas that must be equal."""

from pathlib import Path

from albert_ds.checkpoint.folder import describe_saved
from albert_ds.engine.engine import Engine
from albert_ds.errors import Diverged
from albert_ds.parallel.mesh import find_drift

# A non-finite gradient skips its step; fp16 needs up to 17 of these to find its loss scale.
MAX_SKIPPED_IN_A_ROW = 20
DRIFT_CHECK_EVERY = 100  # steps


def check_health(engine: Engine, *, step: int, skipped_in_a_row: int, output: Path) -> None:
    """Raise Diverged after too many skipped steps. Collective over tensor-parallel peers.

    Every `DRIFT_CHECK_EVERY` steps also assert that replicated parameters are equal bit for bit.
    """
    if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise diverged(step, skipped_in_a_row, output)
    if step % DRIFT_CHECK_EVERY == 0:
        drifted = find_drift(engine.deepspeed.module, engine.mesh)
        assert not drifted, f"replicas differ across tensor-parallel peers: {drifted}"


def diverged(step: int, skipped_in_a_row: int, output: Path) -> Diverged:
    """The ending of a run whose last steps were all skipped."""
    return Diverged(
        f"the gradient was not finite {skipped_in_a_row} steps in a row, up to step {step}; "
        f"{describe_saved(output)}"
    )
