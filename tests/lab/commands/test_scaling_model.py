"""The commands predict and plan."""

import json
import re
import shutil
from dataclasses import asdict, replace

import pytest
from albert_lab.commands.scaling_model import main
from albert_lab.scaling.hardware import GPUS, describe_gpu, read_gpu
from albert_lab.scaling.layout import Layout
from albert_lab.scaling.step_time import predict_step

from albert_ds.base.errors import UserError
from albert_ds.model.config import SIZES
from albert_ds.settings.pretrain import read_config
from tests.conftest import ROOT

CHANGING = ("--gpus", "8", "--batch-size", "4096@0,1024@50%", "--sequence-length", "64..512@9")
PLAN = ("plan", "--link", "100", "--steps", "1000")


def ask(capsys, *flags) -> str:
    main([str(flag) for flag in flags])
    return capsys.readouterr().out


def read_plan(text: str) -> dict[str, str]:
    """The rows of the plan's first table."""
    table = text.split("\n\n")[1].splitlines()[2:]
    return {name.strip(): value.strip() for _, name, value, *_ in (row.split("|") for row in table)}


def test_models_side_by_side(capsys):
    said = ask(capsys, "predict", "--gpus", "8", "64", "--links", "10", "100", "3200")
    assert said.startswith("PREDICTED, H100; ")
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines()[2:]
    )
    assert [tuple(row[:3]) for row in rows] == [
        (gpus, f"{4096 // int(gpus)}", link)
        for gpus in ("8", "64")
        for link in ("10", "100", "3200")
    ]
    alone, several = (
        [float(row[head.index("albert-large, speed-up")]) for row in rows if row[0] == gpus]
        for gpus in ("8", "64")
    )
    assert len(set(alone)) == 1  # one node crosses no link
    # The less a link carries the more sharing matters; on the fastest it is no more than FLOPs.
    assert several == sorted(several, reverse=True) and several[0] > several[-1] > 1
    # The first model's speed and its exposed share are those of its own step.
    speed, exposed = rows[3][3].split(", ")
    layout = Layout(
        name="bert-large",
        model=SIZES["bert-large"],
        ranks=64,
        nodes=8,
        micro_batch_size=32,
        accumulation=2,
    )
    step = predict_step(layout, describe_gpu(GPUS["h100"], width=1024), link=10e9)
    assert speed == f"{4096 / step.total:,.0f}"
    assert exposed == f"{step.communication / step.total:.0%}"


@pytest.mark.parametrize("name", ["albert-base", "albert-xxlarge", "bert-large"])
@pytest.mark.parametrize(
    "cluster", [("--gpus", "8"), ("--gpus", "64"), ("--gpus", "64", "--gpu-memory", "6"), CHANGING]
)
def test_the_printed_command_is_one_that_the_trainer_accepts(name, cluster, data, tmp_path, capsys):
    said = ask(capsys, *PLAN, "--model", name, *cluster)
    command = re.search(r" {4}(deepspeed (?:.*\\\n)*.*)", said)[1].replace("\\\n", " ").split()
    ranks = int(cluster[1])
    starts = ["--num_gpus", "8"] if ranks == 8 else ["--hostfile", "HOSTFILE"]
    assert command[:5] == ["deepspeed", *starts, "--module", "albert_ds.train"]
    assert ("`NAME slots=8` for each of the 8 nodes" in said) == (ranks == 64)
    asked = [{"DATA": str(data), "RUN": str(tmp_path / "run")}.get(word, word) for word in command]
    # The test's shards hold shorter sequences.
    config = read_config([*asked[5:], "--sequence-length", "64"], world_size=ranks)[0]
    plan = read_plan(said)
    accumulation = config.deepspeed["gradient_accumulation_steps"]
    passes = f"{config.micro_batch_size} x {accumulation}"
    assert passes == plan["micro-batch x accumulation"]
    assert config.activation_checkpointing == plan["activation checkpointing"]
    assert str(config.tensor_parallel) == plan["tensor parallel"]
    assert str(config.deepspeed["zero_optimization"]["stage"]) == plan["ZeRO stage"]


def test_the_rows_add_up_and_the_rule_is_printed(capsys):
    said = ask(capsys, *PLAN, "--model", "albert-xxlarge", "--gpus", "64")
    plan = read_plan(said)
    names = list(plan)
    whole = next(name for name in names if name.startswith("GB per GPU"))
    last = names.index("step, seconds")
    parts = [float(plan[name]) for name in names[names.index(whole) + 1 : last]]
    assert round(sum(parts), 2) == float(plan[whole]) and len(parts) == 4
    hours = float(plan["hours for 1,000 steps"])
    assert float(plan["GPU-hours"]) == pytest.approx(64 * hours, abs=64 * 0.05 + 0.5)
    assert "Rule: the lowest ZeRO stage" in said
    others = next(part for part in said.split("\n\n") if part.splitlines()[0].endswith("/s |"))
    speeds = [float(row.split("|")[-2].replace(",", "")) for row in others.splitlines()[2:]]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) == 5


@pytest.mark.parametrize(("name", "share"), [("albert-xlarge", 0.92), ("albert-xxlarge", 0.90)])
def test_fp8_takes_the_measured_speed_and_less_memory(name, share, capsys):
    flags = [*PLAN, "--model", name, "--gpus", "8", "--micro-batch-size", "32"]
    plain, said = (read_plan(ask(capsys, *flags, *more)) for more in ((), ("--fp8",)))
    h = SIZES[name].hidden_size
    f = SIZES[name].ffn_size
    layers = SIZES[name].num_layers
    tokens = 32 * 512
    masked = 32 * 77
    outside = 128 * h + 128 * 30_000
    of_a_layer = 4 * h * h + 2 * h * f
    mixed = layers * 2 * h * 512
    every = tokens * (128 * h + layers * of_a_layer + mixed) + masked * outside
    fraction = float(said["share of the FLOPs in fp8"].rstrip("%")) / 100
    assert fraction == pytest.approx((layers - 1) * tokens * of_a_layer / every, abs=1e-3)
    assert fraction == pytest.approx(share, abs=0.01)
    # The one block's weights as they lie and transposed, a byte each.
    assert float(said["- weights in eight bits"]) == round(2 * of_a_layer / 1e9, 2)
    assert float(said["- activations"]) < float(plain["- activations"])
    whole = ask(capsys, *flags, "--fp8")
    assert "5% at most of two sizes on one H200" in whole and "15%" not in whole
    assert 'FP8.json is ds_configs/zero1_bf16.json with "fp8": {"enabled": true} in it.' in whole


def test_a_teacher_is_in_memory_step_and_command(data, tmp_path, capsys):
    """The model has as many pieces as the teacher; of a run its shape is read alone."""
    folder, short = tmp_path / "a teacher", tmp_path / "short"
    shape = replace(SIZES["albert-xxlarge"], vocab_size=100_000)
    for run, length in ((folder, 512), (short, 128)):
        (run / "checkpoints").mkdir(parents=True)
        shutil.copy(data / "spiece.model", run)
        record = {"model": asdict(shape), "trained_length": length}
        (run / "config.json").write_text(json.dumps(record))
    flags = (*PLAN, "--model", "albert-base", "--gpus", "8", "--micro-batch-size", "32")
    plain = read_plan(ask(capsys, *flags))
    text = ask(capsys, *flags, "--teacher", folder)
    said = read_plan(text)
    h = 4096
    f = 4 * 4096
    e = 128
    block = 4 * (h * h + h) + h * f + f + f * h + h + 2 * 2 * h
    head = h * e + 3 * e + 100_000
    whole = (100_000 + 512 + 2) * e + 2 * e + e * h + h + block + (h * h + h) + head + 2 * h + 2
    assert float(said["- the teacher's weights"]) == round(2 * whole / 1e9, 2) > 0
    # 12 states and the inner layer twice, beside the projections joined; more than the scores.
    states = 2 * (32 * 512 * (12 * h + 2 * f) + 3 * h * h)
    assert float(said["- the teacher's pass"]) == pytest.approx(states / 1e9, abs=0.01)
    assert float(said["step, seconds"]) > 2 * float(plain["step, seconds"])
    assert f"--teacher '{folder}'\n" in text
    with pytest.raises(UserError, match=r"--teacher .*short: .* at most 128 tokens"):
        ask(capsys, *flags, "--teacher", short)
    with pytest.raises(UserError, match="--teacher: not with TEXT"):
        ask(capsys, "plan", folder, "--teacher", folder)


def test_the_hours_of_a_short_run_are_not_zero(capsys):
    plan = read_plan(ask(capsys, *PLAN, "--model", "albert-base", "--gpus", "8"))
    hours = 1000 * float(plan["step, seconds"]) / 3600
    assert float(plan["hours for 1,000 steps"]) == pytest.approx(hours, rel=0.05)
    assert float(plan["GPU-hours"]) == pytest.approx(8 * hours, rel=0.05)


def test_each_size_takes_as_long_as_it_did_on_one_h200(capsys):
    """The largest micro-batch that was measured of each size; two of them are a step."""
    lines = (ROOT / "docs/raw/gpu_h200_2_results.jsonl").read_text().splitlines()
    measured = [record for line in lines if (record := json.loads(line)).get("kind") == "speed"]
    for size, micro in (("base", 256), ("large", 128), ("xlarge", 32), ("xxlarge", 32)):
        name = f"albert-{size}"
        one_gpu = ["--gpus", "1", "--batch-size", 2 * micro]
        flags = ("--hardware", "h200", "--micro-batch-size", micro)
        said = ask(capsys, *PLAN, "--model", name, *one_gpu, *flags)
        wanted = {"size": name, "micro": micro, "checkpointing": "none", "rows": "random"}
        (seconds,) = (
            record["found"]["step_seconds"]
            for record in measured
            if wanted.items() <= record.items() and "kernels_from" not in record
        )
        assert float(read_plan(said)["step, seconds"]) == pytest.approx(seconds, rel=0.04)


def test_sizes_in_fp8_take_the_time_and_the_memory_that_they_took_on_one_h200(capsys):
    lines = (ROOT / "docs/raw/gpu_h200_3_results.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line)).get("kind") == "fp8 steps"]
    for record in records:
        measured = record["found"]
        flags = ["--fp8"] if record["fp8"] else []
        flags += ["--model", record["size"], "--gpus", "1", "--hardware", "h200"]
        said = read_plan(ask(capsys, *PLAN, *flags, "--batch-size", 64, "--micro-batch-size", 32))
        assert float(said["step, seconds"]) == pytest.approx(measured["step_seconds"], rel=0.05)
        if record["fp8"]:  # a graph's memory is reserved, not allocated
            (peak,) = (float(said[name]) for name in said if name.startswith("GB per GPU, peak"))
            assert peak == pytest.approx(measured["peak_gb"], rel=0.05)
    assert len(records) == 4


def test_small_passes_wait_for_the_host_as_they_did_on_one_h100(capsys):
    for size, seconds in (("base", 0.0508), ("large", 0.0823)):  # docs/raw/gpu_h100_5_report.md
        flags = ["--model", f"albert-{size}", "--gpus", "1", "--batch-size", 16]
        said = ask(capsys, *PLAN, *flags, "--micro-batch-size", 8)
        assert float(read_plan(said)["step, seconds"]) == pytest.approx(seconds, rel=0.25)


def test_a_users_own_gpu(tmp_path, capsys):
    """Twice the rates take half as long; the memory is the report's."""
    seconds = []
    for factor in (1, 2):
        report = {"device": "Mine", "bf16_tflops": 300 * factor, "memory_bytes": 40e9}
        report["memory_bandwidth_gb_s"] = 2000 * factor
        path = tmp_path / f"report-{factor}.json"
        path.write_text(json.dumps(report | {"more": [1]}))
        said = ask(capsys, *PLAN, "--model", "albert-xxlarge", "--gpus", "1", "--hardware", path)
        assert "on 1 Mine" in said and "(at most 36.0)" in said
        seconds.append(float(read_plan(said)["step, seconds"]))
    assert seconds[0] / seconds[1] == pytest.approx(2, rel=0.01)


def test_what_was_measured_on_an_h100_is_an_h100(tmp_path):
    """The rates of a report are those of one product and one copy, a datasheet's are the most."""
    lines = (ROOT / "docs/raw/gpu_h100_1_results.jsonl").read_text().splitlines()
    machine = next(record for line in lines if (record := json.loads(line))["kind"] == "machine")
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(machine))
    measured, sheet = (describe_gpu(read_gpu(name), width=1024) for name in (str(path), "h100"))
    for rate in ("a_flop", "a_weight", "an_update", "a_parameter"):
        assert getattr(measured, rate) == pytest.approx(getattr(sheet, rate), rel=0.01)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("predict", "--gpus", "12"), "--gpus 12"),
        (("predict", "--mfu", "1.5"), "--mfu 1.5"),
        ((*PLAN, "--gpu-memory", "0"), "--gpu-memory 0"),
        ((*PLAN, "--sequence-length", "4096"), "--sequence-length 4096.* 512"),
        ((*PLAN, "--micro-batch-size", "3"), "--micro-batch-size 3.* 512"),
        ((*PLAN, "--fp8"), "--fp8: albert-base is refused with --hidden-size 768: .* 2048 on"),
        ((*PLAN, "--hardware", "v100"), "--hardware v100.*a100, h100, h200"),
        ((*PLAN, "--hardware", "docs/raw/scaling_constants.json"), "--hardware .*device"),
    ],
)
def test_wrong_input_is_named(capsys, flags, says):
    more = ("--model", "albert-base", "--gpus", "8") if flags[0] == "plan" else ()
    with pytest.raises(UserError, match=says) as caught:
        ask(capsys, *flags, *more)
    assert "\n" not in str(caught.value)
