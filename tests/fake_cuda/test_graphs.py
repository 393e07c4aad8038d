"""Steps by CUDA graphs, which are tapes here, are eager steps bit for bit."""

import json
from pathlib import Path

from tests.command import run_python
from tests.fake_cuda.test_fake_cuda import fake_cuda, run_on_cuda, train  # noqa: F401 (a fixture)


def test_the_bench_tells_the_hosts_part_of_a_step(fake_cuda, data, tmp_path):  # noqa: F811
    """Of text, by graphs and without: times, the share of graphs, memory. A graph has no update."""
    report = tmp_path / "report.json"
    files = [f"ds_configs/zero{s}_bf16.json" for s in (1, 3)]
    command = ("tools/throughput_bench.py", "--models", "albert-tiny", "--data", data)
    more = ("--micro-batch", 2, "--sequence-length", 64, "--rounds", 1, "--steps", 2)
    done = run_python(*command, *more, "--deepspeed_config", *files, "--output", report)
    assert done.returncode == 0, done.stderr[-4000:]
    by_graphs, eager = json.loads(report.read_text())["cells"]
    assert by_graphs["by_graph"] == 1 and by_graphs["graphs"] >= 1 and "by_graph" not in eager
    for cell in (by_graphs, eager):
        assert len(cell["rounds"][0]["step_seconds"]) == 2
        assert min(cell["host_ms"], cell["update_ms"], cell["reserved_gb"]) > 0
        assert "launches" not in cell  # torch's profiler sees none of this device
    title = "step ms | 90th percentile | host ms of a micro-batch | host ms of the update |"
    assert f"| {title} run by graphs | GB reserved |\n" in done.stdout


def test_rows_that_are_all_full_run_by_graphs(fake_cuda, tmp_path):  # noqa: F811
    """Each of 32 rows has 4 predictions, 0.4 more than its share."""
    report = tmp_path / "report.json"
    size = ("--micro-batch", 32, "--sequence-length", 24, "--rounds", 1, "--steps", 1)
    flags = ("--deepspeed_config", "ds_configs/zero1_bf16.json", "--output", report)
    done = run_python("tools/throughput_bench.py", "--models", "albert-tiny", *size, *flags)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [cell["by_graph"] for cell in json.loads(report.read_text())["cells"]] == [1]


def read_weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:08d}" / "weights.safetensors").read_bytes()


def count_eager(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["eager_micro_batches"] for line in lines if "mlm_loss" in line]


def test_a_graph_gives_what_eager_launches_give(fake_cuda, tmp_path):  # noqa: F811
    run_on_cuda(tmp_path, [("tests.fake_cuda.graph_cases", [])])


def test_runs_by_graphs_are_eager_runs_bit_for_bit(fake_cuda, data, tmp_path):  # noqa: F811
    """Accumulation, clipping, both stages of ZeRO; depths that are drawn, exits, an average; a
    teacher, which is part of the graphs."""
    more = dict(depth_schedule="1-2@0", exit_losses="1:0.5", z_loss=0.001, average=0.9)
    runs, pairs = [], []
    for name, config, options in (
        ("zero1", "zero1_bf16.json", {}),
        ("zero2", "zero2_bf16.json", {}),
        ("depths", "zero1_bf16_adamw.json", more),
        ("teacher", "zero2_bf16.json", {"teacher": tmp_path / "zero1"}),
    ):
        given = dict(steps=4, save_every=4, eval_every=4, dropout=0.1, **options)
        pairs.append((tmp_path / name, tmp_path / f"{name}-eager"))
        runs += [train(data, folder, config, **given) for folder in pairs[-1]]
        runs[-1][1].append("--no-graphs")
    run_on_cuda(tmp_path, runs)
    for by_graphs, eager in pairs:
        assert read_weights(by_graphs, 4) == read_weights(eager, 4)
        assert count_eager(by_graphs) == [0] * 4
        assert "eager_micro_batches" not in (eager / "metrics.jsonl").read_text()


def test_a_run_that_stopped_goes_on_bit_for_bit(fake_cuda, data, tmp_path):  # noqa: F811
    given = dict(save_every=2, eval_every=4, dropout=0.1, max_hours=100)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    argv = [train(data, folder, "zero1_bf16.json", steps=4, **given) for folder in (whole, parts)]
    run_on_cuda(tmp_path, [argv[0], argv[1]])
    for folder in (parts / "checkpoints").glob("step-00000004"):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    (parts / "checkpoints" / "latest").write_text("step-00000002\n")
    run_on_cuda(tmp_path, [argv[1]])
    assert read_weights(parts, 4) == read_weights(whole, 4)
