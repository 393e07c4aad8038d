"""Several models on clusters of several sizes and links, at one global batch."""

import bisect
import math

from albert_ds.errors import UserError
from albert_ds.model.config import SIZES
from albert_ds.scaling.layout import Layout
from albert_ds.scaling.predict import Machine, predict_step

MOST_PASSES = 10_000  # of a step


def predict_grid(
    models: list[str],
    machine: Machine,
    *,
    gpus: list[int],
    links: list[float],
    gpus_a_node: int,
    batch_size: int,
    micro_batch_size: int,
    sequence_length: int,
) -> list[dict]:
    """One object a model, number of GPUs and link (Gb/s of a node), with its speed-up over the
    first model in the same cluster. ZeRO-1 in bf16, passes of `micro_batch_size` at most.

    Raises UserError for a batch that the GPUs do not divide, and for nodes that are not full.
    """
    rows = []
    for ranks in gpus:
        if batch_size % ranks:
            raise UserError(f"--gpus {ranks}: does not divide --batch-size {batch_size}")
        if ranks > gpus_a_node and ranks % gpus_a_node:
            raise UserError(f"--gpus {ranks}: not a multiple of the {gpus_a_node} GPUs of a node")
        local = batch_size // ranks
        micro = next(n for n in range(min(local, micro_batch_size), 0, -1) if local % n == 0)
        for link in links:
            yardstick = None
            for name in models:
                layout = Layout(
                    name=name,
                    model=SIZES[name],
                    ranks=ranks,
                    nodes=max(1, ranks // gpus_a_node),
                    micro_batch_size=micro,
                    accumulation=local // micro,
                    sequence_length=sequence_length,
                )
                step = predict_step(layout, machine, link=link * 1e9)
                yardstick = yardstick or step.total
                rows.append(
                    {
                        "model": name,
                        "gpus": ranks,
                        "nodes": layout.nodes,
                        "link_gbits": link,
                        "sequences_a_gpu": local,
                        "micro_batch_size": micro,
                        "overlap": machine.overlap,
                        "step_seconds": step.total,
                        "compute_seconds": step.compute,
                        "communication_seconds": step.communication,
                        "hidden_seconds": step.hidden,
                        "optimizer_seconds": step.optimizer,
                        "samples_a_second": batch_size / step.total,
                        "wire_bytes": step.wire_bytes,
                        "speed_up": yardstick / step.total,
                    }
                )
    return rows


def largest_batch(
    models: tuple[str, str],
    machine: Machine,
    *,
    link: float,
    speed_up: float,
    nodes: int,
    gpus_a_node: int,
    micro_batch_size: int,
    sequence_length: int,
) -> int | None:
    """Sequences a GPU in a step, at most, for the second model to be `speed_up` times the first's.

    0 where it never is, None where it still is at MOST_PASSES passes a step.
    """

    def reaches(passes: tuple[int, int]) -> bool:
        first, second = (
            predict_step(
                Layout(
                    name=name,
                    model=SIZES[name],
                    ranks=nodes * gpus_a_node,
                    nodes=nodes,
                    micro_batch_size=passes[0],
                    accumulation=passes[1],
                    sequence_length=sequence_length,
                ),
                machine,
                link=link * 1e9,
            )
            for name in models
        )
        return first.total >= speed_up * second.total

    candidates = [(n, 1) for n in range(1, micro_batch_size)]
    candidates += [(micro_batch_size, n) for n in range(1, MOST_PASSES + 1)]
    # A larger batch computes more for the same bytes, so the speed-up only falls.
    count = bisect.bisect_left(candidates, True, key=lambda passes: not reaches(passes))
    if count == len(candidates):
        return None
    return math.prod(candidates[count - 1]) if count else 0
