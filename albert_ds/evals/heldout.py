"""Held-out losses and accuracies, with the same masks at every evaluation (paper, 4.2.1)."""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from albert_ds.cli import log_line
from albert_ds.data.samples import MicroBatch, StreamConfig
from albert_ds.data.shards import open_shards, read_index
from albert_ds.data.stream import heldout_batches
from albert_ds.errors import DamagedData
from albert_ds.parallel.consensus import Counts, agree
from albert_ds.parallel.mesh import Mesh
from albert_ds.report.metrics import OUTPUTS, summarise

LEAK_ACCURACY = 0.97  # a SOP accuracy above it means a leak of the order; the paper's is 0.865


def evaluate_heldout(
    module: torch.nn.Module,
    data: Path | str,
    stream: StreamConfig,
    *,
    limit: int,
    micro_batch_size: int,
    mesh: Mesh,
    device: torch.device,
) -> dict[str, float | int | None]:
    """`heldout_*` metrics over the first `limit` held-out samples of `data`.

    Empty where nothing was held out. Collective over all ranks.
    """
    if read_index(data)["splits"]["heldout"]["samples"] == 0:
        return {}
    batches = heldout_batches(
        open_shards(data, "heldout"),
        stream,
        limit=limit,
        micro_batch_size=micro_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
    )
    values = evaluate(module, batches, mesh, device, stream.objective)
    accuracy = values.get("heldout_sop_accuracy") or 0
    if mesh.rank == 0 and accuracy > LEAK_ACCURACY:
        log_line(
            f"held-out SOP accuracy {accuracy:.3f}: look for a leak of the order (paper: 0.865)"
        )
    return values


@torch.no_grad()
def evaluate(
    module: torch.nn.Module,
    batches: Iterable[MicroBatch],
    mesh: Mesh,
    device: torch.device,
    objective: str,
) -> dict[str, float | int | None]:
    """Run `module` over this rank's micro-batches; the metrics are over all ranks. Collective.

    Every rank must have the same number of micro-batches, since under ZeRO-3 a forward pass is
    collective. Raises DamagedData on every rank if the data of any rank is damaged.
    """
    error = None
    try:
        micro_batches = list(batches)
    except DamagedData as caught:
        micro_batches, error = [], caught
    mine = sum((Counts.of(batch) for batch in micro_batches), Counts())
    counts, _ = agree(mesh, mine, error=error)
    outputs = torch.zeros(len(OUTPUTS), dtype=torch.float64, device=device)
    was_training = module.training
    module.eval()
    for batch in micro_batches:
        result = module(**batch.on(device))
        outputs += torch.stack([result[name].double() for name in OUTPUTS])
    module.train(was_training)
    dist.all_reduce(outputs, group=mesh.dp_group)
    values = summarise(outputs, counts, objective)
    return {
        **{f"heldout_{key}": value for key, value in values.items()},
        "heldout_masked": counts.masked,
        "heldout_pairs": counts.pairs,
    }
