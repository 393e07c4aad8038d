"""LAMB against the release's formula, written again in float64."""

import math

import pytest
import torch

from albert_ds.base.schedules import learning_rate
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.optim.adam import decay_groups
from albert_ds.optim.lamb import Lamb
from tests.runs import SMALL


def released_lamb(weight, gradients, *, lr, decay, adapt, bias_correction=False):
    w = weight.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        g = g.double()
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        if bias_correction:
            u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + decay * w
        else:
            u = m / (v.sqrt() + 1e-6) + decay * w
        w_norm, u_norm = w.norm(), u.norm()
        ratio = w_norm / u_norm if adapt and w_norm > 0 and u_norm > 0 else 1.0
        w = w - lr * ratio * u
    return w


def step_all(optimizer, parameters, gradients):
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("bias_correction", [False, True])
def test_equals_the_formula(bias_correction):
    torch.manual_seed(0)
    named = {
        "block.weight": torch.randn(7, 5),
        "block.bias": torch.randn(5),
        "layer_norm.weight": torch.randn(6),
        "fresh.weight": torch.zeros(3, 2),  # norm 0: the ratio is 1
    }
    parameters = {n: torch.nn.Parameter(t.clone()) for n, t in named.items()}
    groups = decay_groups(parameters.items(), 0.01)
    optimizer = Lamb(groups, lr=0.02, bias_correction=bias_correction)
    ordered = list(parameters.values())
    gradients = [[torch.randn_like(p) for p in ordered] for _ in range(4)]
    gradients[2][0].zero_()
    step_all(optimizer, ordered, gradients)
    for index, (name, start) in enumerate(named.items()):
        adapted = name in ("block.weight", "fresh.weight")
        expected = released_lamb(
            start,
            [step[index] for step in gradients],
            lr=0.02,
            decay=0.01 if adapted else 0.0,
            adapt=adapted,
            bias_correction=bias_correction,
        )
        torch.testing.assert_close(parameters[name].double(), expected, rtol=1e-5, atol=1e-7)


def test_schedule_of_the_release():
    def rate(step):
        return learning_rate(step, peak=0.00176, warmup_steps=3125, num_steps=125_000)

    assert rate(0) == 0
    assert rate(1000) == pytest.approx(0.00176 * 1000 / 3125)
    assert rate(3124) == pytest.approx(0.001759, abs=1e-6)
    assert rate(3125) == pytest.approx(0.001716, abs=1e-6)  # decay is counted from step 0
    assert rate(62_500) == pytest.approx(0.00088)
    assert rate(125_000) == 0 and rate(200_000) == 0
    assert learning_rate(0, peak=1.0, warmup_steps=0, num_steps=10) == 1.0


def test_the_other_shapes_of_the_rate():
    def rates(num_steps=100, **options):
        given = dict(peak=2.0, warmup_steps=10, num_steps=num_steps, **options)
        return [learning_rate(step, **given) for step in range(num_steps + 3)]

    warm_up = [0.2 * step for step in range(10)]
    cosine = [1.1 + 0.9 * math.cos(math.pi * step / 90) for step in range(91)]
    assert rates(shape="cosine", final=0.1) == pytest.approx([*warm_up, *cosine, 0.2, 0.2])
    fall = [2 - 1.5 * step / 20 for step in range(21)]
    wsd = rates(shape="wsd", final=0.25, cooldown=0.2)
    assert wsd == pytest.approx([*warm_up, *[2.0] * 70, *fall, 0.5, 0.5])
    # More steps prolong the plateau and change nothing before.
    assert rates(200, shape="wsd", final=0.25, cooldown=0.2)[:81] == wsd[:81]
    assert rates(shape="wsd", cooldown=0.0) == pytest.approx([*warm_up, *[2.0] * 90, 0, 0, 0])
    line = [2 * (0.1 + 0.9 * (1 - step / 100)) for step in range(10, 101)]
    assert rates(final=0.1) == pytest.approx([*warm_up, *line, 0.2, 0.2])


def test_two_groups_hold_the_parameters_in_their_order():
    """ZeRO flattens a group in this order, so earlier runs go on with the same bits."""
    named = dict(AlbertForPretraining(SMALL).named_parameters())
    groups = decay_groups(named.items(), 0.01)
    plain = [name for name in named if "layer_norm" in name or name.endswith("bias")]
    for group, names in zip(groups, ([n for n in named if n not in plain], plain), strict=True):
        assert [id(p) for p in group["params"]] == [id(named[name]) for name in names]
