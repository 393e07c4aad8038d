"""Several models on clusters of several sizes and links, at one global batch."""

from albert_ds.errors import UserError
from albert_ds.model.config import SIZES
from albert_ds.scaling.layout import Layout
from albert_ds.scaling.predict import Machine, predict_step


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
