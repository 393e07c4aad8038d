"""Held-out losses and accuracies, with the same masks at every evaluation (paper, 4.2.1)."""

import torch
import torch.distributed as dist

from albert_ds.errors import DamagedData
from albert_ds.runtime.agreement import Counts, agree
from albert_ds.runtime.metrics import OUTPUTS, summarise


@torch.no_grad()
def evaluate(module, batches, mesh, device, objective: str) -> dict[str, float | int | None]:
    """Run `module` over the held-out micro-batches of this rank; `heldout_*` over all ranks.

    Every rank gets the same number of micro-batches, since under ZeRO-3 a forward pass is
    collective. Raises DamagedData on every rank where any rank's data is damaged.
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
