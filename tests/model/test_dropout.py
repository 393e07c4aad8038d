"""Draws are fair, what is kept makes up for what is dropped, and gradients fall where values do."""

import numpy as np
import pytest
import torch

from albert_ds.model.draws import mix
from albert_ds.model.dropout import Dropout, draw_dropped, drop


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_said_and_the_mean_stays(probability):
    torch.manual_seed(0)
    x = torch.ones(1001, 1003)
    out = drop(x, probability)
    dropped = (out == 0).double().mean().item()
    spread = (probability * (1 - probability) / x.numel()) ** 0.5
    assert abs(dropped - probability) < 4 * spread
    assert out.max().item() == pytest.approx(1 / (1 - probability))
    assert abs(out.double().mean().item() - 1) < 4 * spread / (1 - probability)
    # Neighbours are as independent as any.
    zero = (out == 0).double().view(-1)
    both = (zero[:-1] * zero[1:]).mean().item()
    assert both == pytest.approx(probability**2, abs=5 * spread)


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.97])
def test_every_place_is_dropped_as_often_and_in_every_company(probability):
    torch.manual_seed(0)
    times, count = 20_000, 4
    drawn = torch.zeros(times, count, dtype=torch.bool)
    keys = mix(np.arange(times, dtype=np.uint64))
    for row, places in zip(drawn, draw_dropped(keys, [count] * times, probability), strict=True):
        row[places] = True
    companies = (drawn.long() * torch.tensor([1, 2, 4, 8])).sum(1).bincount(minlength=16)
    for company, frequency in enumerate(companies.tolist()):
        dropped = company.bit_count()
        expected = times * probability**dropped * (1 - probability) ** (count - dropped)
        assert abs(frequency - expected) < 4.5 * expected**0.5 + 3, company


def test_every_draw_is_another_and_the_generator_s_state_brings_one_back():
    x = torch.ones(64, 64)
    torch.manual_seed(0)
    first, second = drop(x, 0.5), drop(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(drop(x, 0.5), first) and not torch.equal(first, second)


def test_the_gradient_is_dropped_where_the_value_was():
    x = torch.full((50, 50), 3.0, requires_grad=True)
    out = drop(x, 0.25)
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach() / 3)


def test_it_is_off_in_evaluation_and_at_0():
    x = torch.ones(8)
    assert Dropout(0.5).eval()(x) is x and Dropout(0.0)(x) is x
