"""Bytes of a step against the minimum, docs/deepspeed.md and what shapes alone say."""

import json
import re
from dataclasses import replace

import pytest
from albert_lab.commands import comm_volume
from albert_lab.scaling.collectives import ACTIVATIONS, SMALL
from albert_lab.scaling.layout import CHECKPOINTING

from albert_ds.base.errors import UserError
from albert_ds.model.config import SIZES
from albert_ds.model.shapes import count_params
from albert_ds.process.world import read_world
from tests.command import ROOT, run_command
from tests.distributed import run_ranks
from tests.runs import join

CONFIGS = ("zero0_fp32", "zero1_fp32", "zero1_bf16", "zero2_bf16", "zero3_bf16")
SIZE = SIZES["albert-tiny"]
OWN = "norm,scale,position,lora:4"


def measure(rank: int, *flags: str, again=("none",)) -> list[dict]:
    """What `albert-ds traffic --measure` does as one of its ranks."""
    from tests.preload import TRAFFIC

    args = comm_volume.build_parser().parse_args(["--models", "albert-tiny", *flags])
    configs = comm_volume.list_configs(args, read_world().size)
    configs = [replace(config, activation_checkpointing=x) for config in configs for x in again]
    return comm_volume.measure_configs(configs, TRAFFIC)


def measure_again(rank: int, *flags: str) -> list[dict]:
    """The same with each choice of what backward recomputes."""
    return measure(rank, *flags, again=CHECKPOINTING)


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--ranks", 2, "--sharing", "groups:3"), "--sharing groups:3: 3 does not divide"),
        (("--ranks", 2, "--sequence-length", 1), "--sequence-length 1: must be at least 5"),
        (("--measure", "--ranks", 10**6), "--ranks 1000000: at most "),
    ],
)
def test_wrong_input_is_one_line(flags, said):
    done = run_command("traffic", "--models", "albert-tiny", *flags)
    assert done.code == 2 and done.err.count("\n") == 1 and said in done.err


MUON = ("zero1_fp32_muon", "zero1_bf16_muon")


@pytest.fixture(scope="module")
def reports() -> dict[tuple[int, str], dict]:
    """By tensor-parallel size, or by what backward recomputes, and configuration."""
    by_layout = {}
    for tp, names in (
        (1, (*CONFIGS, *MUON, "zero1_fp32_adamw")),
        (2, ("zero1_fp32", "zero1_bf16", *MUON)),
    ):
        files = [f"ds_configs/{name}.json" for name in names]
        flags = ("--tensor-parallel", str(tp), "--deepspeed_config", *files)
        measured = run_ranks(measure, 2, *flags)[0]
        by_layout |= {(tp, name): report for name, report in zip(names, measured, strict=True)}
    flags = ("--tensor-parallel", "2", "--sharing", "cycle:2", "--per-layer", OWN)
    file = ("--deepspeed_config", "ds_configs/zero1_fp32.json")
    own = run_ranks(measure_again, 2, *flags, *file)[0]
    return by_layout | {
        (again, "zero1_fp32"): x for again, x in zip(CHECKPOINTING, own, strict=True)
    }


def show_header(rank: int, *flags: str) -> list[str]:
    """What a job's log says of the gradients, and nothing else of a training."""
    args = comm_volume.build_parser().parse_args(["--models", "albert-tiny", *flags])
    from albert_lab.measurement import open_bench_run

    from albert_ds.training.screen import describe_run

    device, mesh = join(args.tensor_parallel)
    configs = comm_volume.list_configs(args, mesh.world_size)
    runs = [open_bench_run(c, mesh, device) for c in configs]
    return [describe_run(run.config.size, run, num_nodes=1)["gradients"] for run in runs]


@pytest.mark.parametrize(("data_parallel", "tp"), [(2, 1), (2, 2), (1, 2)])
def test_the_header_of_a_job_says_the_bytes_that_are_measured(data_parallel, tp):
    """With the model's sharing and without, at each ZeRO stage; without peers nothing is sent."""
    files = [f"ds_configs/{name}.json" for name in (CONFIGS if tp == 1 else ["zero1_bf16"])]
    flags = ("--deepspeed_config", *files, "--tensor-parallel", str(tp))
    shown = run_ranks(show_header, data_parallel * tp, *flags)[0]
    if data_parallel == 1:
        assert shown == ["reduced over one data-parallel rank: nothing is sent"]
        return
    patterns = ("all", "none")
    reports = run_ranks(measure, data_parallel * tp, *flags, "--sharing", *patterns)[0]
    measured = {(r["deepspeed_config"], r["sharing"]): r["kinds"]["gradients"] for r in reports}
    for text, file in zip(shown, files, strict=True):
        numbers = [float(x) for x in re.findall(r"(\S+) MB", text)]
        sent = [measured[file, sharing]["bytes"] / 1e6 for sharing in patterns]
        assert numbers == pytest.approx(sent, abs=0.051), (file, text)
        assert numbers[0] < numbers[1]


def test_muon_sends_each_matrix_to_its_rank_and_back(reports):
    hidden = SIZE.hidden_size
    inner = SIZE.ffn_size
    for (_, name), report in reports.items():
        moved = report["kinds"].get("Muon's matrices")
        assert (moved is not None) == (name in MUON), name
        if moved is None:
            continue
        assert moved["collectives"] == {"reduce": 6, "broadcast": 6}  # however many the layers
        assert moved["bytes"] == 2 * 4 * (4 * hidden * hidden + 2 * hidden * inner)


def test_what_zero_3_tells_its_ranks_once_is_no_matrix_of_muons():
    """After its first pass, so with one micro-batch a step in the step that is counted."""
    file = ("--deepspeed_config", "ds_configs/zero3_bf16.json")
    kinds = run_ranks(measure, 2, *file, "--accumulation", "1")[0][0]["kinds"]
    assert set(kinds) == {"gradients", "weights", SMALL}


def multiple(report, *kinds):
    volumes = [report["kinds"][kind] for kind in kinds]
    sent = sum(kind["wire_bytes"] for kind in volumes)
    return sent / sum(kind["minimum_wire_bytes"] for kind in volumes)


def test_each_costs_what_its_documentation_says(reports):
    parameters = sum(count_params(SIZE).values())
    assert {reports[1, name]["parameters_a_rank"] for name in CONFIGS} == {parameters}
    # On two ranks an all-reduce sends the tensor once: 2 (n - 1) / n = 1.
    zero0 = reports[1, "zero0_fp32"]["kinds"]["gradients"]
    assert zero0["wire_bytes"] == pytest.approx(4 * parameters, rel=0.02)
    assert multiple(reports[1, "zero0_fp32"], "gradients") == pytest.approx(1, rel=0.02)
    both = ("gradients", "weights")
    assert multiple(reports[1, "zero1_fp32"], *both) == pytest.approx(3 / 2, rel=0.02)
    assert multiple(reports[1, "zero1_bf16"], *both) == pytest.approx(5 / 3, rel=0.02)
    assert multiple(reports[1, "zero3_bf16"], *both) == pytest.approx(1, rel=0.02)


def test_nothing_sends_less_than_the_minimum(tmp_path):
    """A user's JSON that does not say in which type gradients are reduced: DeepSpeed takes bf16."""
    files = [tmp_path / f"{name}.json" for name in ("zero1_bf16", "zero3_bf16")]
    for file in files:
        config = json.loads((ROOT / "ds_configs" / file.name).read_text())
        del config["communication_data_type"]
        file.write_text(json.dumps(config))
    reduced, scattered = run_ranks(measure, 2, "--deepspeed_config", *map(str, files))[0]
    assert multiple(reduced, "gradients") == pytest.approx(2, rel=0.02)
    assert multiple(scattered, "gradients") == pytest.approx(1, rel=0.02)


def test_lamb_adds_one_reduction_of_two_sums_for_each_tensor_that_it_adapts(reports):
    """Word, type, position, projection; q, k, v, output, up, down; pooler, MLM transform, pair."""
    lamb, adamw = (reports[1, f"zero1_fp32{o}"]["kinds"][SMALL] for o in ("", "_adamw"))
    assert (lamb["calls"] - adamw["calls"], lamb["bytes"] - adamw["bytes"]) == (1, 2 * 8 * 13)


def test_a_shared_block_is_reduced_and_gathered_once(reports):
    """albert-tiny uses its block several times; accumulation is 2."""
    assert SIZE.num_layers > 1
    for name in ("zero0_fp32", "zero1_fp32", "zero1_bf16"):
        assert reports[1, name]["kinds"]["gradients"]["calls"] == 1, name
    weights = reports[1, "zero3_bf16"]["kinds"]["weights"]
    parameters = reports[1, "zero3_bf16"]["parameters_a_rank"]
    assert weights["bytes"] == pytest.approx(2 * 2 * parameters, rel=0.02)  # bf16, 2 micro-batches


def test_tensor_parallel_activations_are_at_their_minimum(reports):
    # Rows of 32, one per micro-batch, two micro-batches; 5 masked. Two all-reduces a layer each
    # way.
    tokens = 32 * 2
    needed = (5 + 1) * 2
    least = ((4 * SIZE.num_layers - 3) * tokens + 3 * needed) * SIZE.hidden_size * 4
    volume = reports[2, "zero1_fp32"]["kinds"]["tensor-parallel activations"]
    assert volume["minimum_wire_bytes"] == least
    assert volume["wire_bytes"] == pytest.approx(least, rel=0.02)


def test_what_is_counted_without_training_is_what_the_engine_moves(reports):
    """Byte for byte, but for what ZeRO pads its up to three groups with; norms are not counted."""
    for (tp, name), report in reports.items():
        again, tp = (tp, 2) if tp in CHECKPOINTING else ("none", tp)
        file = ("--deepspeed_config", f"ds_configs/{name}.json", "--tensor-parallel", str(tp))
        own = ("--sharing", report["sharing"], "--per-layer", report["per_layer"])
        flags = ["--models", "albert-tiny", *file, *own]
        (config,) = comm_volume.list_configs(comm_volume.build_parser().parse_args(flags), 2)
        assert comm_volume.is_counted(config.deepspeed)
        counted = comm_volume.count_step(replace(config, activation_checkpointing=again), 2)
        kinds = {kind: volume for kind, volume in report["kinds"].items() if kind != SMALL}
        assert counted["kinds"].keys() == kinds.keys(), name
        assert (ACTIVATIONS in kinds) == (tp > 1)
        for kind, volume in kinds.items():
            calls = counted["kinds"][kind]["calls"]
            padding = 4 * 2 * 2 * 3 * 2
            assert calls == volume["calls"], (name, kind)
            assert 0 <= volume["bytes"] - counted["kinds"][kind]["bytes"] <= padding, (name, kind)


def test_the_figure_of_the_readme_takes_seconds_and_no_weights(monkeypatch, capsys):
    monkeypatch.delattr(comm_volume, "start_ranks")
    monkeypatch.delattr(comm_volume, "measure_configs")
    assert comm_volume.main(["--models", "bert-large", "albert-large", "--ranks", "2"]) == 0
    assert capsys.readouterr().out.count("bert-large sends 18.8 times as much.") == 2


def test_what_the_list_does_not_know_is_measured_and_said(monkeypatch, capsys):
    monkeypatch.setattr(comm_volume, "start_ranks", lambda ranks: 7)
    file = "ds_configs/tried/zero1_fp32_reduce_to_owners.json"
    flags = ["--models", "albert-large", "--ranks", "2", "--deepspeed_config", file]
    assert comm_volume.main(flags) == 7
    said = capsys.readouterr().err
    assert f"{file}: other settings; measured on 2 ranks: at most 1.9 GB" in said, said
    assert " minutes" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    (
        *("--tensor-parallel 3", "--sharing nope", "--deepspeed_config no.json"),
        "--sequence-length 513",
    ),
)
def test_wrong_input_is_one_line_before_any_rank_starts(words, monkeypatch):
    monkeypatch.delattr(comm_volume, "start_ranks")
    with pytest.raises(UserError, match=f"^{words}[: ]"):
        comm_volume.main(["--ranks", "2", *words.split()])
