"""The bench starts its own ranks, steps real engines, and reports speed and where time goes."""

import json
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import psutil
import pytest
from albert_lab import measurement
from albert_lab.bench_run import bench_config
from albert_lab.commands import throughput_bench
from albert_lab.throughput_tables import PAPER, steps_as_table

from albert_ds.base.errors import UserError
from albert_ds.base.files import may_replace
from albert_ds.model.config import SIZES
from albert_ds.process.world import World
from tests.command import ROOT, run_python
from tests.distributed import run_ranks
from tests.runs import join

SMALL = ("--sequence-length", "16", "--vocab-size", "50")
PARTS = ("forward", "backward", "communication", "optimizer", "data_wait", "other")


def bench(*flags) -> subprocess.CompletedProcess:
    return run_python("tools/throughput_bench.py", *flags, *SMALL)


def check_cell(cell: dict, rounds: int) -> None:
    """A model on two ranks under ZeRO-1 in fp32: its bytes, and parts that add up to the step."""
    assert len(cell["rounds"]) == rounds and cell["ranks"] == 2 and cell["zero"] == 1
    gradients = 4 * cell["parameters"]  # each unique parameter once
    for turn in cell["rounds"]:
        assert gradients <= turn["bytes_a_step"]["gradients"] <= 1.01 * gradients
        assert gradients <= turn["bytes_a_step"]["weights"] <= 1.01 * gradients
        assert turn["wire_bytes_a_step"] == pytest.approx(1.5 * gradients, rel=0.01)
        parts = [turn[f"{part}_seconds"] for part in PARTS]
        assert min(parts) >= 0 and 0 < sum(parts) <= turn["seconds_a_step"]
        assert 0 < sum(turn["step_seconds"]) <= turn["seconds_a_step"] * len(turn["step_seconds"])
        assert turn["tokens_a_second"] == pytest.approx(16 * turn["samples_a_second"])
        assert turn["flops_a_step"] == cell["flops_a_step"]


@pytest.mark.nightly
def test_two_models_on_two_ranks(tmp_path):
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    done = bench(
        *("--models", "bert-base", "albert-base", "--ranks", "2", "--rounds", "2"),
        *("--micro-batch", "1", "--peak-tflops", "0.5", "--output", report),
        *("--profile", trace),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(report.read_text())
    assert measured["peak_flops"] == 0.5e12 and measured["versions"]["torch"]
    bert, albert = measured["cells"]
    assert (bert["model"], albert["model"]) == ("bert-base", "albert-base")
    for cell in (bert, albert):
        check_cell(cell, rounds=2)
    assert bert["parameters"] > 10 * albert["parameters"]  # what sharing saves
    # Weights, gradients, DeepSpeed's bucket, half of the master weights and of both moments: those
    # of this model alone, though the other one is in the process as well.
    for cell in (bert, albert):
        own = cell["rounds"][0]["peak_memory"] - cell["process_memory"]
        assert 4.5 * 4 * cell["parameters"] < own < 4.5 * 4 * cell["parameters"] + 1e9
    ratio = PAPER["albert-base"] / PAPER["bert-base"]
    assert f"| {ratio:.2g} |" in done.stdout and "MFU" in done.stdout
    events = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"bert-base", "albert-base", "forward", "backward", "optimizer"} <= events


def test_a_tiny_model_on_two_ranks(tmp_path):
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    done = bench(
        *("--models", "albert-tiny", "--ranks", "2", "--rounds", "1"),
        *("--micro-batch", "1", "--output", report, "--profile", trace),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert may_replace(report) and may_replace(trace)  # by the same command
    (cell,) = json.loads(report.read_text())["cells"]
    check_cell(cell, rounds=1)
    assert f"| albert-tiny | {cell['parameters']:,} | zero1_fp32 | none |" in done.stdout
    # On a CPU the host is the device, and has no part of its own.
    assert "| step ms | 90th percentile |\n" in done.stdout
    assert not {"host_ms", "launches", "by_graph", "reserved_gb"} & cell.keys()


def test_single_steps_and_what_only_some_cells_know_in_a_table():
    plain = {"model": "albert-base", "deepspeed_config": "zero1_bf16.json", "ranks": 1}
    plain |= {"activation_checkpointing": "none"}
    plain["rounds"] = [{"step_seconds": [0.1, 0.2]}, {"step_seconds": [0.3, 0.4, 1.0]}]
    cells = [{**plain, "launches": 545.0, "by_graph": 0.987}, {**plain, "launches": 816.5}]
    head, _, *rows = steps_as_table(cells).splitlines()
    assert head.endswith("| step ms | 90th percentile | launches a micro-batch | run by graphs |")
    assert rows[0].endswith("| none | 300.0 | 760.0 | 545 | 98.7% |")
    assert rows[1].endswith("| 816 | - |")


def count_rows(rank: int) -> list[int]:
    """Micro-batches made before the first step, and in all."""
    from tests.preload import TRAFFIC

    device, mesh = join(1)
    config = bench_config(
        "albert-tiny",
        replace(SIZES["albert-tiny"], vocab_size=50),
        deepspeed_config="ds_configs/zero1_fp32.json",
        micro_batch_size=1,
        sequence_length=16,
    )
    with patch.object(measurement, "collate", wraps=measurement.collate) as made:
        cells = measurement.open_cells([config], mesh, device, warmup=0)
        before = made.call_count
        measurement.take_turns(cells, TRAFFIC, rounds=2, steps=5)
    return [before, made.call_count]


def test_no_timed_step_makes_its_own_rows():
    assert run_ranks(count_rows, 1) == [[measurement.SYNTHETIC] * 2]


@pytest.mark.nightly
def test_a_sweep_measures_every_combination_that_divides(tmp_path):
    report = tmp_path / "report.json"
    done = bench(
        *("--models", "albert-tiny", "--rounds", "1", "--warmup", "0"),
        *("--ranks", "1,2", "--tensor-parallel", "1,2", "--micro-batch", "1,3"),
        *("--deepspeed_config", "ds_configs/zero1_bf16.json", "ds_configs/zero3_bf16.json"),
        *("--output", report),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "left out: 1 ranks with --tensor-parallel 2" in done.stderr
    cells = json.loads(report.read_text())["cells"]
    axes = ("ranks", "tensor_parallel", "micro_batch_size", "zero")
    assert [tuple(cell[axis] for axis in axes) for cell in cells] == [
        (ranks, tensor_parallel, micro_batch, zero)
        for ranks, tensor_parallel in ((1, 1), (2, 1), (2, 2))
        for micro_batch in (1, 3)
        for zero in (1, 3)
    ]
    assert all(cell["rounds"][0]["samples_a_second"] > 0 for cell in cells)


@pytest.mark.nightly
def test_killing_it_leaves_no_rank_behind():
    cells = ",".join("1" * 1000)
    flags = ("--models", "albert-tiny", "--rounds", "1", "--micro-batch", cells, *SMALL)
    command = [sys.executable, "tools/throughput_bench.py", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        next(line for line in process.stdout if line.startswith("| albert-tiny"))
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert len(ranks) >= 2 and not psutil.wait_procs(ranks, timeout=120)[1]


def test_on_a_gpu_the_defaults_are_those_of_a_gpu(monkeypatch):
    for gpus, ranks, micro_batch, file in (
        (0, [2], [4], "zero1_fp32"),
        (1, [1], [32], "zero1_bf16"),
        (8, [8], [32], "zero1_bf16"),
    ):
        monkeypatch.setattr(throughput_bench, "count_gpus", lambda gpus=gpus: gpus)
        args = throughput_bench.build_parser().parse_args(["--models", "albert-tiny"])
        throughput_bench.fill_defaults(args, World(rank=0, local_rank=0, size=1, launcher="none"))
        assert (args.ranks, args.micro_batch) == (ranks, micro_batch)
        assert (ROOT / "ds_configs" / f"{file}.json").samefile(*args.deepspeed_config)


@pytest.mark.parametrize(
    "flags, named",
    [
        (("--models", "albert-huge"), "albert-huge"),
        (("--models", "albert-tiny", "--ranks", "1,x"), "--ranks x: must be a whole number"),
        (("--models", "albert-tiny", "--tensor-parallel", "3", "--ranks", "3"), "--num-heads"),
        (("--models", "albert-tiny", "--micro-batch", "1,2", "--profile", "x"), "--profile"),
        (("--models", "albert-tiny", "--profile", "x", "--output", "x"), "--profile x: is also"),
        (
            ("--models", "albert-tiny", "--ranks", "1,2", "--tensor-parallel", "3"),
            "1 ranks with --tensor-parallel 3, 2 ranks with --tensor-parallel 3: must divide",
        ),
        (("--models", "albert-tiny", "--vocab-size", "5"), "--vocab-size 5: must be at least 14"),
        (("--models", "albert-tiny", "--ranks", "1000000"), "--ranks 1000000: at most "),
        (("--models", "albert-tiny", "--micro-batch", "1000000000"), "--micro-batch .* GB, this"),
        (("--models", "albert-tiny", "--sequence-length", "513"), "albert-tiny has 512 positions"),
    ],
)
def test_wrong_input_is_one_line(flags, named, capsys):
    with pytest.raises(UserError, match=named) as caught:
        throughput_bench.main(list(flags))
    assert "\n" not in str(caught.value) and not capsys.readouterr().err
