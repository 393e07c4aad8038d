"""Predicted memory against the bytes of tensors in real steps."""

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
    for cell in cells:
        assert abs(cell["error"]) < 0.1, cell
        measured, predicted = cell["measured"], cell["predicted"]
        assert abs(predicted["lives"] / measured["lives"] - 1) < 0.01, cell
    keeps, again = (cell["measured"]["peak"] for cell in cells)
    assert keeps > again
