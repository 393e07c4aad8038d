"""What `albert-ds probe` measures of a frozen model beside its held-out losses.

`measure_similarity` gives the L2 distance and the angle between input and output of every layer
(Figure 1): in the paper ALBERT-large changes its input more smoothly from layer to layer than
BERT-large, and does not converge. `encode_pairs` and `train_head` give NSP and SOP accuracy of a
model that was trained for another objective (Table 5): a logistic regression of its [CLS] on pairs
from the training shards. The model itself never changes.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from albert_ds.data.micro_batch import MicroBatch
from albert_ds.model.albert import AlbertForPretraining

MEASURES = ("mlm_loss", "mlm_accuracy", "l2", "degrees")  # at a depth
_ENCODER_INPUTS = ("input_ids", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen")


def _encode(model: AlbertForPretraining, tensors: dict, **more) -> dict:
    return model.albert(**{name: tensors[name] for name in _ENCODER_INPUTS}, **more)


@torch.no_grad()
def encode_pairs(
    model: AlbertForPretraining, batches: Iterable[MicroBatch], device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """Features float32 [pairs, H] and labels int64 [pairs] of all pairs that have a label.

    A feature is the pooled [CLS], or its last hidden state in a model without a pooler.
    """
    model.eval()
    features, labels = [], []
    for batch in batches:
        tensors = batch.on(device)
        encoded = _encode(model, tensors, output_positions=tensors["cu_seqlens"][:-1].long())
        states = encoded["pooled"]
        states = encoded["last_hidden_state"] if states is None else states
        answers = tensors["pair_labels"]
        features.append(states[answers >= 0].float().cpu().numpy())
        labels.append(answers[answers >= 0].cpu().numpy())
    return np.concatenate(features), np.concatenate(labels)


def train_head(features: np.ndarray, labels: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Labels int64 predicted for `held` [n, H] by a two-way head trained on the rest."""
    from sklearn import linear_model, pipeline, preprocessing

    regression = linear_model.LogisticRegression(max_iter=1000)
    head = pipeline.make_pipeline(preprocessing.StandardScaler(), regression)
    return head.fit(features, labels).predict(held)


@torch.no_grad()
def measure_similarity(
    model: AlbertForPretraining, batches: Iterable[MicroBatch], device: torch.device
) -> dict[str, list[float] | int]:
    """Means over all tokens, one number a layer: `l2`, `degrees` (0 to 180); and `tokens`."""
    model.eval()
    sums = None
    tokens = 0
    for batch in batches:
        states = _encode(model, batch.on(device))["hidden_states"]
        distances = torch.stack([_compare(a, b) for a, b in zip(states, states[1:], strict=False)])
        sums = distances if sums is None else sums + distances
        tokens += batch.tokens
    assert sums is not None and tokens, "no tokens to measure"
    means = (sums / tokens).tolist()
    return {
        "l2": [distance for distance, _ in means],
        "degrees": [angle for _, angle in means],
        "tokens": tokens,
    }


@torch.no_grad()
def measure_depths(
    model: AlbertForPretraining,
    batches: Iterable[MicroBatch],
    depths: Sequence[int],
    device: torch.device,
) -> list[dict[str, float | int]]:
    """Loss and accuracy of masked words at ascending depths, and `l2` and `degrees` per token.

    These are from the output at the depth before, at first from the embedding's. A depth whose
    layers are the first ones of a deeper run is read from that run. `KEY_interval` is half of the
    95 % interval of a mean, by how far it differs between micro-batches; 0 of a single one.
    """
    encoder = model.eval().albert.encoder
    word = model.albert.embeddings.word.weight
    # Else a state is not the output of a layer, but the input of the next.
    is_output = not model.config.has_per_layer("layer.input")
    sums, counts = [], []
    for batch in batches:
        tensors = batch.on(device)
        states, plan, layers = [], [], []
        outputs: dict[int, torch.Tensor] = {}
        for depth in reversed(depths):
            encoder.set_depth(depth)
            begins = plan[:depth] == encoder.plan and layers[:depth] == encoder.layers
            if not (begins and is_output):
                states = _encode(model, tensors)["hidden_states"]
                plan = encoder.plan
                layers = encoder.layers
            outputs[depth] = states[depth]
        before = states[0]
        rows = []
        for depth in depths:
            hidden = outputs[depth][tensors["masked_positions"]]
            results = model.mlm_head(hidden, tensors["masked_labels"], word)
            rows.append(
                torch.cat([torch.stack(results).double(), _compare(before, outputs[depth])])
            )
            before = outputs[depth]
        sums.append(torch.stack(rows).cpu())
        counts.append([batch.masked, batch.masked, batch.tokens, batch.tokens])
    means, errors = _average(torch.stack(sums), torch.tensor(counts))
    keys = (*MEASURES, *(f"{key}_interval" for key in MEASURES))
    rows = torch.cat([means, 1.96 * errors], 1).tolist()
    return [
        {"num_layers": depth, **dict(zip(keys, row, strict=True))}
        for depth, row in zip(depths, rows, strict=True)
    ]


def _average(sums: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of sums [batches, depths, keys] over `counts` [batches, keys], and their standard
    errors, as of ratios: what is alike in a batch, such as tokens of a sentence, is not
    independent (Cochran, Sampling Techniques, 6.3)."""
    number = len(sums)
    total = counts.sum(0)
    means = sums.sum(0) / total
    away = (sums - means * counts[:, None]).square().sum(0)
    return means, (away * number / max(number - 1, 1)).sqrt() / total


def _compare(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Sums over tokens [N, H] of the distance and of the angle in degrees; float64 [2]."""
    before, after = before.double(), after.double()
    distance = (after - before).norm(dim=1)
    cosine = torch.cosine_similarity(before, after, dim=1).clamp(-1, 1)
    return torch.stack([distance.sum(), cosine.arccos().rad2deg().sum()])
