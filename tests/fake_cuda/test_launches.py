"""The faster forms start fewer kernels a layer, counted on the fake device."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.fake_cuda.test_fake_cuda import fake_cuda  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def found(fake_cuda):  # noqa: F811
    command = [sys.executable, "-m", "tests.fake_cuda.launches"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_one_product_for_query_key_and_value(found):
    """In place of three: forward, for dX and for dW; and of their sums over three and layers."""
    plain, joined = found["plain"], found["qkv"]
    assert joined["forward"]["launches"] == plain["forward"]["launches"] - 2
    assert joined["backward"]["launches"] <= plain["backward"]["launches"] - 11
    for name in ("forward", "backward"):
        assert joined[name]["bytes"] < plain[name]["bytes"]


@pytest.mark.parametrize(("fast", "without"), [("gradients", "plain"), ("qkv+gradients", "qkv")])
def test_gradients_of_layers_are_added_inside_their_products(found, fast, without):
    summed, plain = found[fast]["backward"], found[without]["backward"]
    products = plain["calls"]["mm"] // 2  # half of them form dW
    assert summed["calls"]["addmm"] == summed["calls"]["mm"] == products
    assert summed["launches"] == plain["launches"] - products
    assert summed["bytes"] <= 1.001 * plain["bytes"]  # of sums in fp32
