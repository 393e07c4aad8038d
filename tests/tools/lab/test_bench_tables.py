"""Tables from reports: ratios are taken within each round."""

import json
import subprocess
import sys

from tests.conftest import ROOT


def cell(model: str, rounds: list[tuple], **fields) -> dict:
    """`rounds`: seconds of forward and backward, of the update, of exposed communication."""
    return {
        "model": model,
        "ranks": 2,
        "nodes": 2,
        "tensor_parallel": 1,
        "micro_batch_size": 1,
        "accumulation": 1,
        "sequence_length": 64,
        "precision": "fp32",
        "activation_checkpointing": "none",
        "link": "8mbit",
        "link_bits_per_second": 8e6,
        "deepspeed_config": "one.json",
        "zero": 1,
        "flops_a_step": 10.0,
        "rounds": [
            {
                "forward_seconds": passes / 2,
                "backward_seconds": passes / 2,
                "communication_seconds": waiting,
                "seconds_a_step": passes + update + waiting,
                "wire_bytes_a_step": 3e6,
                # Half of what 8 Mbit/s carries in the time.
                "kinds": {"gradients": {"wire_bytes": 0.5e6 * waiting, "seconds": waiting}},
                "calls_a_step": {"gradients": 1, "weights": 1},
                "peak_memory": 2e9,
            }
            for passes, update, waiting in rounds
        ],
        **fields,
    }


def tables(tmp_path, cells: list[dict], *flags: str) -> list[list[str]]:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"cells": cells}))
    command = [sys.executable, "tools/lab/bench_tables.py", str(report), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]


def test_a_speed_up_is_split_into_its_sources(tmp_path):
    large = cell("bert-large", [(4, 2, 6), (8, 4, 12)])  # the second round ran at half the speed
    shared = cell("albert-large", [(4, 1, 1), (8, 2, 2)], flops_a_step=5.0)
    (row,) = tables(tmp_path, [large, shared])
    assert row[:3] == ["albert-large / bert-large", "2 x 1", "1 x 64"]
    assert row[5:] == [
        "1.5 / 9",
        "17% / 50%",
        "50%",
        "2.00",
        "1.00",
        "1.20",
        "2.00 (2.00 .. 2.00)",
    ]


def test_configurations_are_compared_with_the_first(tmp_path):
    first = cell("albert-large", [(2, 1, 1), (2, 1, 1)])
    other = cell("albert-large", [(2, 1, 5), (2, 1, 2)], deepspeed_config="other.json", zero=3)
    rows = tables(tmp_path, [first, other], "--against", "config")
    assert [row[0] for row in rows] == ["one, ZeRO-1", "other, ZeRO-3"]
    assert rows[1][6:] == ["1.62 (1.25 .. 2.00)", "3.50 (2.00 .. 5.00)", "2.00"]
