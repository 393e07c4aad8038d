"""Several models on clusters of several sizes and links, at one global batch."""

import bisect
import math
from dataclasses import dataclass

from albert_ds.errors import UserError
from albert_ds.model.config import SIZES
from albert_ds.scaling.layout import Layout
from albert_ds.scaling.predict import Machine, StepTime, predict_step

MOST_PASSES = 10_000  # of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What all models and clusters of a comparison have in common; in bf16."""

    gpus_a_node: int  # behind one link
    micro_batch_size: int  # sequences of a pass at most
    sequence_length: int  # tokens of a sequence, all real
    zero: int = 1  # ZeRO stage
    tensor_parallel: int = 1  # ranks that a block is cut over

    def layout(self, name: str, ranks: int, micro_batch_size: int, accumulation: int) -> Layout:
        """Raises UserError for nodes that are not full."""
        if ranks > self.gpus_a_node and ranks % self.gpus_a_node:
            raise UserError(
                f"--gpus {ranks}: not a multiple of the {self.gpus_a_node} GPUs of a node"
            )
        return Layout(
            name=name,
            model=SIZES[name],
            ranks=ranks,
            nodes=max(1, ranks // self.gpus_a_node),
            zero=self.zero,
            tensor_parallel=self.tensor_parallel,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            sequence_length=self.sequence_length,
        )


def predict_grid(
    models: list[str],
    machine: Machine,
    recipe: Recipe,
    *,
    gpus: list[int],
    links: list[float],
    batch_size: int,
) -> list[dict]:
    """One object a model, number of GPUs and link (Gb/s of a node), with its speed-up over the
    first model in the same cluster.

    Raises UserError for a batch that the replicas cannot share out evenly.
    """
    rows = []
    for ranks in gpus:
        replicas = ranks // recipe.tensor_parallel
        if ranks % recipe.tensor_parallel or batch_size % replicas:
            raise UserError(
                f"--gpus {ranks}: with --tensor-parallel {recipe.tensor_parallel} they cannot "
                f"share --batch-size {batch_size} out evenly"
            )
        local = batch_size // replicas
        micro = next(n for n in range(recipe.micro_batch_size, 0, -1) if local % n == 0)
        for link in links:
            first = None
            for name in models:
                layout = recipe.layout(name, ranks, micro, local // micro)
                step = predict_step(layout, machine, link=link * 1e9)
                first = first or step
                rows.append(_row(layout, step, first, link, machine.overlap))
    return rows


def _row(layout: Layout, step: StepTime, first: StepTime, link: float, overlap: float) -> dict:
    return {
        "model": layout.name,
        "gpus": layout.ranks,
        "nodes": layout.nodes,
        "link_gbits": link,
        "sequences_a_gpu": layout.batch_size // layout.data_parallel,
        "micro_batch_size": layout.micro_batch_size,
        "overlap": overlap,
        "step_seconds": step.total,
        "compute_seconds": step.compute,
        "communication_seconds": step.communication,
        "hidden_seconds": step.hidden,
        "optimizer_seconds": step.optimizer,
        "samples_a_second": layout.batch_size / step.total,
        "wire_bytes": step.wire_bytes,
        "speed_up": first.total / step.total,
    }


def largest_batch(
    models: tuple[str, str],
    machine: Machine,
    recipe: Recipe,
    *,
    link: float,
    speed_up: float,
    nodes: int,
) -> int | None:
    """Sequences a GPU in a step, at most, for the second model to be `speed_up` times the first's.

    0 where it never is, None where it still is at MOST_PASSES passes a step.
    """
    ranks = nodes * recipe.gpus_a_node

    def reaches(passes: tuple[int, int]) -> bool:
        first, second = (
            predict_step(recipe.layout(name, ranks, *passes), machine, link=link * 1e9).total
            for name in models
        )
        return first >= speed_up * second

    candidates = [(n, 1) for n in range(1, recipe.micro_batch_size)]
    candidates += [(recipe.micro_batch_size, n) for n in range(1, MOST_PASSES + 1)]
    # A larger batch computes more for the same bytes, so the speed-up only falls.
    count = bisect.bisect_left(candidates, True, key=lambda passes: not reaches(passes))
    if count == len(candidates):
        return None
    return math.prod(candidates[count - 1]) if count else 0
