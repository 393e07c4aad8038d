"""Bytes of a step beside the least they could be: the recommended configurations cost what their
documentation says, and a shared block moves once, not once a layer."""

import json
import subprocess
import sys

import pytest

from albert_ds.model.arithmetic import count_params
from albert_ds.model.config import SIZES
from tests.conftest import ROOT

CONFIGS = ("zero0_fp32", "zero1_fp32", "zero1_bf16", "zero3_bf16")


def measure(tmp_path_factory, *flags):
    report = tmp_path_factory.mktemp("volume") / "report.json"
    command = [sys.executable, "tools/comm_volume.py", "--models", "albert-tiny", *flags]
    command += ["--output", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    files = [f"ds_configs/{name}.json" for name in CONFIGS]
    return dict(zip(CONFIGS, measure(tmp_path_factory, "--deepspeed_config", *files), strict=True))


def multiple(report, *kinds):
    found = [report["kinds"][kind] for kind in kinds]
    sent = sum(kind["wire_bytes"] for kind in found)
    return sent / sum(kind["minimum_wire_bytes"] for kind in found)


def test_each_costs_what_its_documentation_says(reports):
    parameters = sum(count_params(SIZES["albert-tiny"]).values())
    assert {report["parameters_a_rank"] for report in reports.values()} == {parameters}
    # On two ranks an all-reduce sends the tensor once: 2 (n - 1) / n = 1.
    zero0 = reports["zero0_fp32"]["kinds"]["gradients"]
    assert zero0["wire_bytes"] == pytest.approx(4 * parameters, rel=0.02)
    assert multiple(reports["zero0_fp32"], "gradients") == pytest.approx(1, rel=0.02)
    both = ("gradients", "weights")
    assert multiple(reports["zero1_fp32"], *both) == pytest.approx(3 / 2, rel=0.02)
    assert multiple(reports["zero1_bf16"], *both) == pytest.approx(5 / 3, rel=0.02)
    assert multiple(reports["zero3_bf16"], *both) == pytest.approx(1, rel=0.02)


def test_a_shared_block_is_reduced_and_gathered_once(reports):
    """albert-tiny uses its block several times; accumulation is 2."""
    assert SIZES["albert-tiny"].num_layers > 1
    for name in CONFIGS[:3]:
        assert reports[name]["kinds"]["gradients"]["calls"] == 1, name
    weights = reports["zero3_bf16"]["kinds"]["weights"]
    parameters = reports["zero3_bf16"]["parameters_a_rank"]
    assert weights["bytes"] == pytest.approx(2 * 2 * parameters, rel=0.02)  # bf16, 2 micro-batches


def test_tensor_parallel_activations_are_counted_beside_their_minimum(tmp_path_factory):
    (report,) = measure(
        tmp_path_factory,
        "--tensor-parallel",
        "2",
        "--deepspeed_config",
        "ds_configs/zero1_fp32.json",
    )
    # Rows of 32, one a pass, two passes; 5 of them masked. Two all-reduces a layer each way.
    size, tokens, read = SIZES["albert-tiny"], 32 * 2, (5 + 1) * 2
    least = ((4 * size.num_layers - 3) * tokens + 3 * read) * size.hidden_size * 4
    found = report["kinds"]["tensor-parallel activations"]
    assert found["minimum_wire_bytes"] == least
    assert found["wire_bytes"] == pytest.approx(least, rel=0.02)
