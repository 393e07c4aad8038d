"""NSP and SOP accuracy of a model whatever its objective was (Table 5's intrinsic columns).

Where the model has no two-way head for a task, that head alone is trained, on pairs from the
training shards: a logistic regression of the frozen pooled [CLS], or, of a model without a pooler,
of its last hidden state there. Nothing of the model changes.
"""

from collections.abc import Iterable

import numpy as np
import torch

from albert_ds.data.samples import MicroBatch
from albert_ds.model.albert import AlbertForPretraining


@torch.no_grad()
def encode_pairs(
    model: AlbertForPretraining, batches: Iterable[MicroBatch], device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """Features float32 [pairs, H] and labels int64 [pairs] of all pairs that have a label."""
    model.eval()
    features, labels = [], []
    for batch in batches:
        tensors = batch.on(device)
        names = ("input_ids", "token_type_ids", "position_ids", "cu_seqlens", "max_seqlen")
        encoded = model.albert(**{name: tensors[name] for name in names})
        found = encoded["pooled"]
        if found is None:
            begins = torch.as_tensor(tensors["cu_seqlens"])[:-1].long()
            found = encoded["last_hidden_state"][begins]
        answers = torch.as_tensor(tensors["pair_labels"])
        features.append(found[answers >= 0].float().cpu().numpy())
        labels.append(answers[answers >= 0].cpu().numpy())
    return np.concatenate(features), np.concatenate(labels)


def train_head(features: np.ndarray, labels: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Labels int64 predicted for `held` [n, H] by a two-way head trained on the rest."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    head = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return head.fit(features, labels).predict(held)
