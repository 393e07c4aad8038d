"""A model's outputs over a whole split, by all ranks, in batches of sequences of similar length.

Under ZeRO-3 a forward pass is collective, so every rank runs the same number of batches. A rank
that has none left repeats another's and drops the result.
"""

import numpy as np
import torch
import torch.distributed as dist

from albert_ds.data.micro_batch import to_device
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
    own: list[tuple[np.ndarray, dict]] = []
    for start in range(0, len(batches), mesh.dp_size):
        number = start + mesh.dp_rank
        units = batches[min(number, len(batches) - 1)]
        tensors = collate(features, units, with_targets=False)
        outputs = {
            name: x.float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy()
            for name, x in module(**to_device(tensors, device)).items()
        }
        if number < len(batches):
            own.append((units, outputs))
    module.train(was_training)
    held = [None] * mesh.world_size if mesh.rank == 0 else None
    dist.gather_object(own if mesh.tp_rank == 0 else [], held, dst=0, group=mesh.control_group)
    if held is None:
        return {}
    return _in_order(features, [part for parts in held for part in parts or []])


def plan_batches(lengths: np.ndarray) -> list[np.ndarray]:
    """Units of similar length together, about TOKENS a batch, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    batches = []
    begin = 0
    total = 0
    for position, unit in enumerate(order):
        total += int(lengths[unit])
        if total > TOKENS and position > begin:
            batches.append(order[begin:position])
            begin = position
            total = int(lengths[unit])
    return [*batches, order[begin:]]


def _in_order(features: Features, parts: list[tuple[np.ndarray, dict]]) -> dict[str, np.ndarray]:
    lengths = features.lengths
    stops = np.cumsum(lengths)
    units = np.concatenate([units for units, _ in parts])
    outputs = {}
    for name in parts[0][1]:
        values = np.concatenate([part[name] for _, part in parts])
        places = units
        if len(values) > len(units):  # a token each
            assert features.choices == 1
            places = np.concatenate([np.arange(stops[u] - lengths[u], stops[u]) for u in units])
        outputs[name] = np.empty_like(values)
        outputs[name][places] = values
    return outputs
