"""Predicted memory against the bytes of tensors in real steps."""

import pytest

from tests.distributed import run_ranks


def measure(rank: int, *flags: str) -> dict:
    """What tools/lab/memory_bench.py does as one of its ranks."""
    from tests.preload import TRAFFIC
    from tools.lab.memory_bench import build_parser, measure_cell

    return measure_cell(build_parser().parse_args(list(flags)), TRAFFIC)


def test_the_peak_is_predicted():
    flags = ["--models", "albert-tiny", "--micro-batch-size", "4", "--sequence-length", "128"]
    flags += ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--activation-checkpointing"]
    cells = [run_ranks(measure, 2, *flags, mode)[0] for mode in ("none", "block")]
    own = ("--per-layer", "norm,scale,position,lora:8", "--sharing", "cycle:2")
    cells.append(run_ranks(measure, 2, *flags, "none", *own)[0])
    for cell in cells:
        assert abs(cell["error"]) < 0.1, cell
        measured, predicted = cell["measured"], cell["predicted"]
        assert abs(predicted["lives"] / measured["lives"] - 1) < 0.01, cell
    keeps, again, more = (cell["measured"]["peak"] for cell in cells)
    assert more > keeps > again
    added = cells[2]["predicted"]["peak"] - cells[0]["predicted"]["peak"]
    assert added == pytest.approx(more - keeps, rel=0.05)
