"""GLUE's metrics against their formulas written out."""

import numpy as np
import pytest

from albert_ds.tasks.metrics import score_glue


def test_classification_metrics_are_their_formulas():
    rng = np.random.default_rng(0)
    labels, logits = rng.integers(0, 2, 50), rng.normal(size=(50, 2))
    said = logits[:, 1] > logits[:, 0]
    tp, tn = (said & (labels == 1)).sum(), (~said & (labels == 0)).sum()
    fp, fn = (said & (labels == 0)).sum(), (~said & (labels == 1)).sum()
    found = score_glue(("matthews", "accuracy", "f1"), logits, labels)
    root = np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    assert found["matthews"] == pytest.approx((tp * tn - fp * fn) / root)
    assert found["accuracy"] == pytest.approx((tp + tn) / 50)
    assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))


def test_correlations_are_their_formulas():
    rng = np.random.default_rng(1)
    labels = rng.uniform(0, 5, 40)
    scores = labels**3 + rng.normal(size=40)
    found = score_glue(("pearson", "spearman"), scores[:, None], labels)

    def correlate(a, b):
        a, b = a - a.mean(), b - b.mean()
        return (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())

    ranks = [x.argsort().argsort().astype(float) for x in (labels, scores)]
    assert found["pearson"] == pytest.approx(correlate(labels, scores))
    assert found["spearman"] == pytest.approx(correlate(*ranks))
    assert found["spearman"] > found["pearson"]


def test_a_constant_correlates_with_nothing():
    labels = np.array([1.0, 2.0])
    found = score_glue(("pearson", "spearman"), np.ones((2, 1)), labels)
    assert found == {"pearson": 0.0, "spearman": 0.0}
