"""Bits are fair, what is kept makes up for what is dropped, and gradients fall where values do."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from albert_ds.model.dropout import LEVELS, Dropout, drop


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_said_and_the_mean_stays(probability):
    torch.manual_seed(0)
    x = torch.ones(1001, 1003)  # not a multiple of the values in a random word
    out = drop(x, probability)
    dropped = (out == 0).double().mean().item()
    spread = (probability * (1 - probability) / x.numel()) ** 0.5
    assert abs(dropped - probability) < 4 * spread + 0.5 / LEVELS
    assert out.max().item() == pytest.approx(1 / (1 - probability), rel=1e-4)
    assert abs(out.double().mean().item() - 1) < 4 * spread / (1 - probability)
    # Neighbours, which share a random word, are as independent as any.
    zero = (out == 0).double().view(-1)
    both = (zero[:-1] * zero[1:]).mean().item()
    assert both == pytest.approx(probability**2, abs=5 * spread)


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


def test_recomputation_drops_the_same_values():
    x = torch.ones(100, 100, requires_grad=True)
    out = checkpoint(lambda y: drop(y.square(), 0.5), x, use_reentrant=False)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * out.detach())  # d(x^2) = 2 where it was kept
    assert (out == 0).any()


def test_it_is_off_in_evaluation_and_at_0():
    x = torch.ones(8)
    assert Dropout(0.5).eval()(x) is x and Dropout(0.0)(x) is x
