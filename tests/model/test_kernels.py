"""The Triton kernels against torch's operators in float64: values and gradients.

Without a GPU they run in Triton's interpreter (tests/conftest.py).
"""

import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from albert_ds.model import cross_entropy, dropout, fp8, fused, fused_block, kernels
from albert_ds.model.albert import AlbertForPretraining
from albert_ds.model.cross_entropy import sum_cross_entropy
from albert_ds.model.draws import Draws, is_kept
from tests.command import run_python
from tests.model.conftest import build_batch, build_config

EPS = 1e-12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Differences over the largest value. In 16 bits: one rounding of the result, two where a function
# rounds between its parts.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_()


def with_gradients(function, inputs, gradient):
    result = function(*inputs)
    return [result, *torch.autograd.grad(result, inputs, gradient)]


def assert_near(tensors, reference, dtype: torch.dtype, roundings: int = 1):
    """reference: of float64."""
    for one, other in zip(tensors, reference, strict=True):
        assert one.shape == other.shape
        off = (one.double() - other).abs().max() / other.abs().max()
        assert off < roundings * TOLERANCE[dtype]


def in_float64(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


@TYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (7, 48), (33, 768)])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_residual_norm(dtype, rows, width, dropout):
    inputs = [
        draw(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,), (width,))
    ]
    gradient = torch.randn(rows, width, device=DEVICE, dtype=dtype)
    kept = find_kept(rows, width, dropout, seed=2**61 + 5)
    draws = draw_from(rows, 2**61 + 5)

    def reference(x, added, weight, bias):
        return F.layer_norm(x + kept * added, (width,), weight, bias, EPS)

    def kernel(x, added, weight, bias):
        return kernels.ResidualNorm.apply(x, added, weight, bias, EPS, dropout, draws)

    expected = with_gradients(reference, in_float64(inputs), gradient.double())
    assert_near(with_gradients(kernel, inputs, gradient), expected, dtype)


def draw_from(rows: int, seed: int) -> Draws:
    ends = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    return Draws(torch.tensor(seed) + torch.arange(rows, device=DEVICE), ends, site=3)


def find_kept(rows: int, width: int, dropout: float, seed: int) -> torch.Tensor:
    """1 / (1 - dropout) at what the kernel keeps, else 0: where a gradient reaches `added`."""
    unit = torch.ones(width, device=DEVICE)
    none = torch.zeros(width, device=DEVICE)
    ramp = torch.arange(width, device=DEVICE).expand(rows, width).contiguous() * 1.0
    added = torch.zeros(rows, width, device=DEVICE, requires_grad=True)
    y = kernels.ResidualNorm.apply(ramp, added, unit, none, EPS, dropout, draw_from(rows, seed))
    (flowed,) = torch.autograd.grad(y, added, torch.randn_like(y))
    return (flowed != 0) / (1 - dropout)


def test_dropout_keeps_its_share_and_follows_the_seed():
    kept = [find_kept(60, 1024, 0.1, seed) > 0 for seed in (1, 1, 2)]
    assert torch.equal(kept[0], kept[1])
    assert abs(kept[0].double().mean() - 0.9) < 0.006  # 5 standard deviations
    both = (kept[0] & kept[2]).double().mean()
    assert abs(both - 0.81) < 0.008  # independent
    neighbours = (kept[0][:, 1:] & kept[0][:, :-1]).double().mean()
    assert abs(neighbours - 0.81) < 0.008


@pytest.mark.parametrize("width", [3, 48, 128])
def test_torch_s_operators_draw_what_the_kernels_draw(width):
    draws = draw_from(50, 2**63 - 20)  # the last seeds are negative
    x = torch.ones(50, width, device=DEVICE, requires_grad=True)
    y = kernels.Drop.apply(x, 0.3, draws.seeds, draws.number())
    (gradient,) = torch.autograd.grad(y.sum(), x)
    kept = is_kept(draws.seeds, draws.number(), width, 0.3)
    assert torch.equal(y > 0, kept) and torch.equal(y, gradient)
    torch.testing.assert_close(y, kept / 0.7)


@TYPES
def test_linear(dtype):
    inputs = [draw(*shape, dtype=dtype) for shape in ((300, 40), (200, 40), (200,))]
    gradient = torch.randn(300, 200, device=DEVICE, dtype=dtype)
    expected = with_gradients(F.linear, in_float64(inputs), gradient.double())
    assert_near(with_gradients(kernels.Linear.apply, inputs, gradient), expected, dtype)


def of_parts(function, inputs, gradients):
    """The results of a function of several, and the gradients."""
    results = function(*inputs)
    return [*results, *torch.autograd.grad(results, inputs, gradients)]


@TYPES
def test_linear_heads(dtype):
    inputs = [draw(*shape, dtype=dtype) for shape in ((70, 40), (120, 40), (120,))]
    gradients = [torch.randn(70, 40, device=DEVICE, dtype=dtype) for _ in range(4)]

    def reference(x, weight, bias):
        return *F.linear(x, weight, bias).chunk(3, dim=1), x * 1

    wide = [each.double() for each in gradients]
    expected = of_parts(reference, in_float64(inputs), wide)
    parts = of_parts(lambda *x: fused_block.LinearHeads.apply(*x, None), inputs, gradients)
    assert_near(parts, expected, dtype)


@TYPES
def test_linear_gelu(dtype):
    inputs = [draw(*shape, dtype=dtype) for shape in ((300, 40), (200, 40), (200,))]
    widths = (200, 40)
    gradients = [torch.randn(300, width, device=DEVICE, dtype=dtype) for width in widths]

    def reference(x, weight, bias):
        return F.gelu(F.linear(x, weight, bias), approximate="tanh"), x * 1

    wide = [each.double() for each in gradients]
    expected = of_parts(reference, in_float64(inputs), wide)
    parts = of_parts(lambda *x: fused_block.LinearGelu.apply(*x, None), inputs, gradients)
    assert_near(parts, expected, dtype, roundings=2)


@TYPES
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_linear_norm(dtype, dropout):
    shapes = (33, 768), (33, 40), (768, 40), (768,), (768,), (768,)
    inputs = [draw(*shape, dtype=dtype) for shape in shapes]
    gradient = torch.randn(33, 768, device=DEVICE, dtype=dtype)
    kept = find_kept(33, 768, dropout, seed=7)

    def reference(x, y, weight, gain, shift, bias):
        return F.layer_norm(x + kept * F.linear(y, weight, bias), (768,), gain, shift, EPS)

    def kernel(*tensors):
        return fused_block.LinearNorm.apply(*tensors, EPS, dropout, draw_from(33, 7), None)

    expected = with_gradients(reference, in_float64(inputs), gradient.double())
    assert_near(with_gradients(kernel, inputs, gradient), expected, dtype, roundings=2)


@pytest.mark.parametrize(
    # Sums of vectors a pass: two a block, not two a layer, and one for the last layer's keys.
    ("sharing", "checkpointing", "sums"),
    [("all", "none", 5), ("attention", "block", 11), ("cycle:2", "attention", 9)],
)
def test_blocks_of_kernels_that_layers_share(sharing, checkpointing, sums, monkeypatch):
    """A whole model of four layers: the gradients of each block are summed where they are made."""
    launched = count_launches(monkeypatch)
    config = build_config(sharing=sharing)
    batch = build_batch([9, 30, 17, 1])
    rows = len(batch["input_ids"])
    monkeypatch.setattr(
        fused, "MIN_TRITON_ELEMENTS", rows * config.hidden_size
    )  # the last layer has fewer
    runs = []
    for device, dtype in (("cpu", torch.float64), (DEVICE, torch.float32)):
        kernels_run = dtype == torch.float32
        for module in (fused, cross_entropy, dropout):
            monkeypatch.setattr(module, "can_use_triton", lambda x, answer=kernels_run: answer)
        model = AlbertForPretraining(
            config, seed=3, exits={2: 0.5}, activation_checkpointing=checkpointing
        )
        model.to(device, dtype)
        inputs = {n: x if n == "max_seqlen" else x.to(device) for n, x in batch.items()}
        for _ in range(2):  # micro-batches
            out = model(**inputs)
            loss = out["mlm_loss_sum"] + out["pair_loss_sum"] + out["exit_loss_sum"]
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if "key.bias" not in name}
        runs.append([x.cpu() for x in (loss, *gradients.values())])
    assert {"_join", "_gelu_backward", "_norm_backward"} <= launched.keys()
    assert launched["_add_parts"] == 2 * sums
    expected, tensors = runs
    assert_near(tensors, expected, torch.float32)


def count_launches(monkeypatch) -> Counter[str]:
    """How often each kernel is launched from now on, by name."""
    names: Counter[str] = Counter()
    kind = type(kernels._join)
    launch = kind.run

    def run(kernel, *args, **options):
        names[kernel.__name__] += 1
        return launch(kernel, *args, **options)

    monkeypatch.setattr(kind, "run", run)
    return names


@TYPES
@pytest.mark.parametrize("classes", [11, 9001])
@pytest.mark.parametrize("z_loss", [0, 0.1])
def test_cross_entropy(dtype, classes, z_loss):
    logits = draw(9, classes, dtype=dtype)
    labels = torch.randint(classes, (9,), device=DEVICE)
    labels[3], labels[4], labels[5] = -100, logits[4].argmax(), logits[5].argmax()
    loss, correct, *squares = kernels.CrossEntropy.apply(logits, labels, -100, z_loss > 0)
    (gradient,) = torch.autograd.grad(loss * 0.5 + z_loss * sum(squares), logits)
    (wide,) = in_float64([logits])
    expected = F.cross_entropy(wide, labels, ignore_index=-100, reduction="sum")
    wanted = wide[labels != -100].logsumexp(1).square().sum()
    (wide_gradient,) = torch.autograd.grad(expected * 0.5 + z_loss * wanted, wide)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    losses = [each.double() for each in (loss, *squares)]
    wanted = [expected, wanted] if z_loss else [expected]
    torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=0)
    assert_near([gradient], [wide_gradient], dtype)
    assert not gradient[3].any()
    assert correct == sum_cross_entropy(logits, labels)[1] >= 2


def test_no_rows():
    x = torch.randn(0, 32, device=DEVICE, requires_grad=True)
    weight, bias = (torch.randn(32, device=DEVICE, requires_grad=True) for _ in range(2))
    y = kernels.ResidualNorm.apply(x, x, weight, bias, EPS, 0.1, draw_from(0, 1))
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), (x, weight, bias)))
    labels = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    sums = kernels.CrossEntropy.apply(x, labels, -100, True)
    assert [each.item() for each in sums] == [0, 0, 0]


@pytest.mark.nightly
def test_every_kernel_compiles_for_an_a100_and_an_h100(tmp_path):
    """To machine code, by the assembler that Triton brings: types and widths of all sizes.

    Another number of tokens needs no other code: it would be compiled in the middle of a run.
    """
    environ = {"TRITON_CACHE_DIR": tmp_path, "TRITON_INTERPRET": None}
    done = run_python("-m", "tests.model.compile_kernels", "80", "90", **environ)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    functions = (InterpretedFunction, JITFunction)
    named, casts = (
        {name for name, value in vars(module).items() if isinstance(value, functions)}
        for module in (kernels, fp8)
    )
    named -= {"_scale_kept", "_store_part", "_gelu_slope"}  # parts of others
    for target, kinds in (("sm_80", named), ("sm_90a", named | casts)):
        assert {each["kernel"] for each in told if each["target"] == target} == kinds
    assert {each["target"] for each in told} == {"sm_80", "sm_90a"}
    for each in told:
        assert each["code"] > 1000 and each["shared"] <= 48 << 10, each
    codes = [{each["hash"] for each in told if each["tokens"] == tokens} for tokens in (64, 63)]
    assert codes[0] == codes[1]
