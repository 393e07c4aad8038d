"""The official metrics of GLUE, from scikit-learn and scipy."""

import numpy as np


def score_glue(names: tuple[str, ...], logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The named metrics, each from -1 or 0 to 1, over logits [F, labels] (or [F, 1]: scores)."""
    scored = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)
    return {name: float(METRICS[name](labels, scored)) for name in names}


def _matthews(labels, predicted) -> float:
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(labels, predicted)


def _accuracy(labels, predicted) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predicted))


def _f1(labels, predicted) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predicted, zero_division=0.0))


def _pearson(labels, predicted) -> float:
    from scipy.stats import pearsonr

    # A constant has no correlation with anything: 0, as Matthews' has it.
    return float(pearsonr(labels, predicted)[0]) if np.ptp(predicted) and np.ptp(labels) else 0.0


def _spearman(labels, predicted) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(labels, predicted)[0]) if np.ptp(predicted) and np.ptp(labels) else 0.0


METRICS = {
    "matthews": _matthews,
    "accuracy": _accuracy,
    "f1": _f1,
    "pearson": _pearson,
    "spearman": _spearman,
}
