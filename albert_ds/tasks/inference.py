"""A model's outputs over a whole split, by all ranks, in batches of sequences of similar length.

Under ZeRO-3 a forward pass is collective, so every rank runs the same number of batches. A rank
that has none left repeats another's and drops the result.
"""

import numpy as np
import torch
import torch.distributed as dist

from albert_ds.data.samples import to_device
from albert_ds.parallel.mesh import Mesh
from albert_ds.tasks.features import Features, collate

TOKENS = 16384  # of a batch, about: evaluation keeps no activations


@torch.no_grad()
def predict(
    module: torch.nn.Module, features: Features, mesh: Mesh, device: torch.device
) -> dict[str, np.ndarray]:
    """The head's outputs for every unit, in the order of the split, on rank 0; {} elsewhere.

    Arrays [units, ...], float32 or int64. Outputs of single tokens come end to end in the order of
    the sequences. Collective.
    """
    batches = plan_batches(features.unit_lengths)
    was_training = module.training
    module.eval()
    mine: list[tuple[np.ndarray, dict]] = []
    for start in range(0, len(batches), mesh.dp_size):
        number = start + mesh.dp_rank
        units = batches[min(number, len(batches) - 1)]
        tensors = collate(features, units, with_targets=False)
        found = {
            name: x.float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy()
            for name, x in module(**to_device(tensors, device)).items()
        }
        if number < len(batches):
            mine.append((units, found))
    module.train(was_training)
    held = [None] * mesh.world_size if mesh.rank == 0 else None
    dist.gather_object(mine if mesh.tp_rank == 0 else [], held, dst=0, group=mesh.control_group)
    if held is None:
        return {}
    return _in_order(features, [part for parts in held for part in parts or []])


def plan_batches(lengths: np.ndarray) -> list[np.ndarray]:
    """Units of similar length together, about TOKENS a batch, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    batches, begin, total = [], 0, 0
    for position, unit in enumerate(order):
        total += int(lengths[unit])
        if total > TOKENS and position > begin:
            batches.append(order[begin:position])
            begin, total = position, int(lengths[unit])
    return [*batches, order[begin:]]


def _in_order(features: Features, parts: list[tuple[np.ndarray, dict]]) -> dict[str, np.ndarray]:
    lengths = features.lengths
    stops = np.cumsum(lengths)
    outputs = {}
    for name, first in parts[0][1].items():
        if len(first) == len(parts[0][0]):  # a unit each
            whole = np.empty((features.units, *first.shape[1:]), first.dtype)
            for units, found in parts:
                whole[units] = found[name]
        else:  # a token each
            assert features.choices == 1
            whole = np.empty((int(stops[-1]), *first.shape[1:]), first.dtype)
            for units, found in parts:
                cuts = np.cumsum(lengths[units])[:-1]
                for unit, piece in zip(units, np.split(found[name], cuts), strict=True):
                    whole[stops[unit] - lengths[unit] : stops[unit]] = piece
        outputs[name] = whole
    return outputs
