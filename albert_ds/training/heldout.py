"""Held-out losses and accuracies, with the same masks at every evaluation (paper, 4.2.1)."""

import torch
import torch.distributed as dist

from albert_ds.base.cli import log_line
from albert_ds.data.micro_batch import MicroBatch
from albert_ds.data.shards import ShardSet
from albert_ds.data.stream import heldout_batches
from albert_ds.data.stream_config import StreamConfig
from albert_ds.model.albert import name_outputs
from albert_ds.parallel.consensus import Counts, agree, raise_together
from albert_ds.parallel.mesh import Mesh
from albert_ds.training.metrics import summarise

LEAK_ACCURACY = 0.97  # a SOP accuracy above it means a leak of the order; the paper's is 0.865
LEAK_PAIRS = 30  # of fewer a model may have all right by luck


def read_batches(
    source: ShardSet | None,
    stream: StreamConfig,
    *,
    limit: int,
    micro_batch_size: int,
    mesh: Mesh,
    fixed_shapes: bool,
) -> list[MicroBatch]:
    """This rank's micro-batches of the first `limit` samples of a held-out set, masked.

    Empty if nothing was held out (None). Every rank has the same number of them, since under
    ZeRO-3 a forward pass is collective. Collective; raises DamagedData on every rank if one's is
    damaged.
    """
    batches = []
    with raise_together(mesh):
        if source is not None:
            drawn = heldout_batches(
                source,
                stream,
                limit=limit,
                micro_batch_size=micro_batch_size,
                dp_rank=mesh.dp_rank,
                dp_size=mesh.dp_size,
                fixed_shapes=fixed_shapes,
            )
            batches = list(drawn)
    return batches


@torch.no_grad()
def evaluate(
    module: torch.nn.Module,
    batches: list[MicroBatch],
    mesh: Mesh,
    device: torch.device,
    objective: str,
) -> dict[str, float | int | None]:
    """`heldout_*` metrics of the micro-batches of all ranks; empty without any. Collective."""
    if not batches:
        return {}
    counts, _ = agree(mesh, sum(map(Counts.of, batches), Counts()))
    names = name_outputs()
    outputs = torch.zeros(len(names), dtype=torch.float64, device=device)
    was_training = module.training
    module.eval()
    for batch in batches:
        result = module(**batch.on(device))
        outputs += torch.stack([result[name].double() for name in names])
    module.train(was_training)
    dist.all_reduce(outputs, group=mesh.dp_group)
    values = summarise(outputs, counts, objective)
    accuracy = values.get("sop_accuracy") or 0
    if mesh.rank == 0 and accuracy > LEAK_ACCURACY and counts.pairs >= LEAK_PAIRS:
        log_line(
            f"held-out SOP accuracy {accuracy:.3f}: look for a leak of the order (paper: 0.865)"
        )
    return {
        **{f"heldout_{key}": value for key, value in values.items()},
        "heldout_masked": counts.masked,
        "heldout_pairs": counts.pairs,
    }
