"""Matrices in eight bits: the kernels that make them, in Triton's interpreter without a GPU."""

import pytest
import torch

from albert_ds.model import fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = pytest.mark.parametrize("kind", fp8.TOP)


def draw_exact(rows: int, width: int, kind: torch.dtype) -> torch.Tensor:
    """Numbers that the type holds as they are, in bf16: Triton's interpreter rounds otherwise."""
    numbers = torch.arange(256, dtype=torch.uint8).view(kind).float()
    numbers = numbers[numbers.isfinite()]
    drawn = torch.randint(len(numbers), (rows, width), generator=torch.Generator().manual_seed(1))
    drawn[-1, -1] = numbers.argmax()
    return numbers[drawn].to(DEVICE, torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@KINDS
@pytest.mark.parametrize(("rows", "width"), [(16, 16), (37, 80), (130, 144)])
@pytest.mark.parametrize("power", [0, -70, 40])
def test_a_matrix_and_its_transpose_with_the_largest_scale_that_fits(kind, rows, width, power):
    x = draw_exact(rows, width, kind)
    eight = fp8.quantise(x * 2.0**power, kind)
    assert eight.scale.item() == 2.0**power
    assert same_bits(eight.rows, x.to(kind))
    assert eight.columns.shape == (width, -(-rows // 16) * 16)
    assert same_bits(eight.columns[:, :rows].T, x.to(kind))
    assert not eight.columns[:, rows:].float().any()
    assert fp8.quantise(x, kind, columns=False).columns is None


@KINDS
def test_the_largest_value_is_in_the_upper_half_of_the_range_and_never_cut_off(kind):
    limit = torch.finfo(kind).max
    for largest in torch.tensor([1.0, 1.75, 1.7578125, 1.9921875, 3e38, 1e-37, 2.0**-133]):
        x = torch.zeros(16, 16, device=DEVICE, dtype=torch.bfloat16)
        x[5, 3] = -largest
        eight = fp8.quantise(x, kind)
        scaled = x.double() / eight.scale
        low = limit / 2 if largest > 1e-35 else 0  # the scale itself is a normal number
        assert low < -scaled.min() <= limit


@KINDS
def test_zeros_stay_and_what_is_not_finite_makes_the_product_nan(kind):
    x = torch.zeros(16, 16, device=DEVICE, dtype=torch.bfloat16)
    eight = fp8.quantise(x, kind)
    assert eight.scale.isfinite().all() and not eight.rows.float().any()
    for value in (float("inf"), float("-inf"), float("nan")):
        x[2, 7] = value
        assert fp8.quantise(x, kind).scale.isnan().all()
