"""The model's list of collectives against those that a real step was seen to issue."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from albert_ds.model.config import SIZES
from albert_ds.scaling.layout import Layout
from albert_ds.scaling.traffic import ACTIVATIONS, SMALL, count_collectives
from tests.conftest import ROOT

FILES = {
    "zero0_fp32": ("fp32", 0),
    "zero1_bf16": ("bf16", 1),
    "zero2_bf16": ("bf16", 2),
    "zero3_bf16": ("bf16", 3),
}


def measure(folder: Path, *flags: str) -> list[dict]:
    report = folder / "report.json"
    command = [sys.executable, "tools/comm_volume.py", "--models", "albert-tiny", *flags]
    done = subprocess.run(
        [*command, "--output", str(report)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(report.read_text())


@pytest.mark.parametrize(("tp", "files"), [(1, FILES), (2, {"zero1_bf16": FILES["zero1_bf16"]})])
def test_each_stage_sends_what_the_model_says(tmp_path, tp, files):
    configs = [f"ds_configs/{name}.json" for name in files]
    reports = measure(tmp_path, "--tensor-parallel", str(tp), "--deepspeed_config", *configs)
    for report, (precision, zero) in zip(reports, files.values(), strict=True):
        layout = Layout(
            name="albert-tiny",
            model=SIZES["albert-tiny"],
            ranks=2,
            zero=zero,
            tensor_parallel=tp,
            micro_batch_size=1,
            accumulation=2,
            sequence_length=32,
            precision=precision,
        )
        assert layout.parameters == report["parameters_a_rank"]
        counted = {found.kind: found for found in count_collectives(layout)}
        large = {kind: k for kind, k in report["kinds"].items() if kind != SMALL}
        assert (ACTIVATIONS in large) == (tp > 1)
        assert set(large) == {kind for kind in counted if kind != SMALL and counted[kind].bytes}
        for kind, found in large.items():
            assert counted[kind].wire_bytes == pytest.approx(found["wire_bytes"], rel=0.02), kind
            assert counted[kind].calls == found["calls"], kind
