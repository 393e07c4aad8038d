"""How far each layer moves its input: L2 distance and angle between the two (Figure 1).

The paper draws BERT-large against ALBERT-large: shared layers oscillate instead of converging, and
change their input more smoothly from layer to layer.
"""

from collections.abc import Iterable

import torch

from albert_ds.data.samples import MicroBatch
from albert_ds.model.albert import AlbertForPretraining


@torch.no_grad()
def measure_similarity(
    model: AlbertForPretraining, batches: Iterable[MicroBatch], device: torch.device
) -> dict[str, list[float] | int]:
    """Means over all tokens, a number a layer: `l2`, and `degrees` from 0 to 180; and `tokens`."""
    model.eval()
    sums, tokens = None, 0
    for batch in batches:
        tensors = batch.on(device)
        names = ("input_ids", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen")
        states = model.albert(**{name: tensors[name] for name in names})["hidden_states"]
        found = torch.stack([_compare(a, b) for a, b in zip(states, states[1:], strict=False)])
        sums = found if sums is None else sums + found
        tokens += batch.tokens
    assert sums is not None and tokens, "no tokens to measure"
    means = (sums / tokens).tolist()
    return {
        "l2": [distance for distance, _ in means],
        "degrees": [angle for _, angle in means],
        "tokens": tokens,
    }


def _compare(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Sums over tokens [N, H] of the distance and of the angle in degrees; float64 [2]."""
    before, after = before.double(), after.double()
    distance = (after - before).norm(dim=1)
    cosine = torch.cosine_similarity(before, after, dim=1).clamp(-1, 1)
    return torch.stack([distance.sum(), cosine.arccos().rad2deg().sum()])
