"""LAMB and the clipping norm at the sizes of real tensors, on a CPU, against float64.

A long sum in fp32 is wrong at these sizes and right in a small model: 2 % at 16384 x 4096.
"""

from dataclasses import replace

import pytest
import torch

from albert_ds.optim.fragments import ParamFragment
from albert_ds.optim.lamb import Lamb
from albert_ds.optim.norms import compute_norms
from tests.batches import random_samples
from tests.distributed import run_ranks
from tests.runs import SMALL, gather, open_small_run, small_config, take_step

# ALBERT's word embedding, an attention matrix of ALBERT-xxlarge, and its feed-forward matrix.
SHAPES = [(30_000, 128), (4096, 4096), (16_384, 4096)]
TRIED = [*SHAPES[:2], pytest.param(SHAPES[2], marks=pytest.mark.nightly)]
PIECES = (1, 2, 3, 7)
CHUNK = 1 << 20  # elements, so that float64 copies stay small


def draw(shape: tuple[int, int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape[0] * shape[1], generator=generator).mul_(0.02)


def norm64(tensor: torch.Tensor) -> float:
    return sum(float(part.double().square().sum()) for part in tensor.split(CHUNK)) ** 0.5


def reference_update(weight: torch.Tensor, gradient: torch.Tensor, decay: float) -> torch.Tensor:
    """lr 1, first step: -ratio * u in float64, rounded once to fp32."""
    update = torch.empty_like(weight)
    weight_squares = update_squares = 0.0
    for out, w, g in zip(*(x.split(CHUNK) for x in (update, weight, gradient)), strict=True):
        w, g = w.double(), g.double()
        u = 0.1 * g / ((0.001 * g * g).sqrt() + 1e-6) + decay * w
        weight_squares += float(w.square().sum())
        update_squares += float(u.square().sum())
        out.copy_(u)
    return update.mul_(-((weight_squares / update_squares) ** 0.5))


def measure_update(shape: tuple[int, int]) -> dict[int, float]:
    """Relative error of one LAMB update of a tensor, by the number of pieces it is cut into."""
    weight, gradient = draw(shape, 0), draw(shape, 1)
    expected = reference_update(weight, gradient, decay=0.01)
    size = norm64(expected)
    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    optimizer = Lamb([parameter], lr=1.0, weight_decay=0.01)
    errors = {}
    for pieces in PIECES:
        if pieces > 1:
            parameter.data.copy_(draw(shape, 0))
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][name].zero_()
        bounds = [weight.numel() * i // pieces for i in range(pieces + 1)]
        cut = [
            ParamFragment(
                name="one", group=0, flat=parameter, start=start, offset=start, numel=end - start
            )
            for start, end in zip(bounds, bounds[1:], strict=False)
        ]
        optimizer.bind(cut)
        optimizer.step()
        with torch.no_grad():
            off = parameter.data.sub_(expected).sub_(draw(shape, 0))
        errors[pieces] = norm64(off) / size
    return errors


def measure_norm(shape: tuple[int, int]) -> float:
    """Relative error of the norm of a tensor."""
    tensor = draw(shape, 2)[:-5]  # not a multiple of the row
    return abs(float(compute_norms([tensor])) / norm64(tensor) - 1)


@pytest.mark.parametrize("shape", TRIED, ids=str)
def test_the_update_is_that_of_float64_however_a_tensor_is_cut(shape):
    errors = measure_update(shape)
    assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("shape", TRIED, ids=str)
def test_a_norm_is_that_of_float64(shape):
    assert measure_norm(shape) <= 1e-8


def measure_norms(rank: int, configs: list) -> list[tuple[float, float]]:
    """Of each run's first step: the norm of its gradient, and that in float64."""
    norms = []
    samples = random_samples(8, vocab_size=30_000, max_length=32, seed=0)
    for config in configs:
        run = open_small_run(config, [samples])
        norm = take_step(run)
        # The first moments are now a tenth of the gradient, in fp32.
        moments = gather(run.engine, "exp_avg.safetensors").values()
        squares = sum(float(moment.double().square().sum()) for moment in moments)
        norms.append((norm, 10 * squares**0.5))
    return norms


def test_the_global_norm_is_that_of_float64_in_every_stage_and_precision():
    """Of a gradient with ALBERT's word embedding in it, 30,000 x 128."""
    model = replace(SMALL, vocab_size=30_000, embedding_size=128, num_layers=1)
    configs = [
        small_config(
            world_size=1,
            model=model,
            ds_file=f"zero1_{precision}.json",
            ds_changes={"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0},
        )
        for precision, stages in (("fp32", (0, 1, 2, 3)), ("bf16", (1, 2, 3)))
        for stage in stages
    ]
    for config, (norm, expected) in zip(
        configs, run_ranks(measure_norms, 1, configs)[0], strict=True
    ):
        assert norm == pytest.approx(expected, rel=1e-6), config.deepspeed
