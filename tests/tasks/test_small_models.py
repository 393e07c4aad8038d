"""Fine-tuning's defaults for models smaller than the published ones, and its word on guessing."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from albert_ds.model.config import SIZES
from albert_ds.settings.finetune import find_rate
from albert_ds.tasks.recipes import RECIPES
from albert_ds.tasks.registry import TASKS
from albert_ds.training.results import find_constant


@pytest.mark.parametrize(
    ("hidden", "rate"),
    [(4096, 1e-5), (768, 1e-5), (384, 4e-5), (256, 9e-5), (128, 3.6e-4), (64, 1e-3)],
)
def test_narrow_models_get_a_higher_rate(hidden, rate):
    model = replace(SIZES["albert-base"], hidden_size=hidden, num_heads=1)
    assert find_rate(RECIPES["glue/cola"], model) == pytest.approx(rate)


def outputs_of(task, logits, labels):
    features = SimpleNamespace(arrays={"labels": np.array(labels)})
    return (
        task,
        TASKS[task],
        {"dev": SimpleNamespace(features=features)},
        {"dev": {"logits": np.array(logits)}},
    )


def test_a_run_that_ends_at_one_class_says_so():
    constant = [[0.0, 1.0], [0.2, 0.3], [-1.0, 0.0], [0.0, 0.1]]
    (line,) = find_constant(*outputs_of("glue/rte", constant, [1, 1, 0, 1]))
    assert "every prediction is 'not_entailment', which 75.0% of the examples are" in line
    assert not find_constant(*outputs_of("glue/rte", [[1.0, 0.0], *constant[1:]], [1, 1, 0, 1]))
    # Scores are no classes.
    assert not find_constant(*outputs_of("glue/stsb", [[1.0], [1.0]], [1.0, 2.0]))
