"""The pieces of a check, in the order of their worth."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from statistics import mean, median

import torch

from albert_ds.base.errors import Stopped, UserError
from albert_ds.base.files import write_file, write_json
from albert_ds.base.json_files import read_json, read_lines
from albert_lab.gpu_check.check import ROOT, Check, Finding, ended
from albert_lab.tables import spread

PRECISIONS = ("fp32", "bf16", "fp16")
GRIDS = ("1x2", "2x1", "2x2")  # tensor x data parallel ranks, all on one GPU
SECONDS_TO_STOP = 40  # of a training: the last evaluation, and the end of the process
KERNELS = 10  # of a profile, in the report
# 160 steps of 512 x 512 tokens are 42 million. True: what --quick takes.
TRAINING = {
    False: "--model albert-base --sequence-length 512 --batch-size 512 --micro-batch-size 64 "
    "--num-workers 4 --steps 160 --warmup-steps 30 --log-every 5 --eval-every 40 "
    "--eval-samples 512",
    True: "--model albert-tiny --num-layers 2 --sequence-length 64 --batch-size 16 "
    "--micro-batch-size 8 --num-workers 2 --steps 12 --warmup-steps 2 --log-every 1 "
    "--eval-every 6 --eval-samples 32",
}
CURVES = (
    "--model albert-xlarge --sequence-length 512 --batch-size 64 --micro-batch-size 32 "
    "--num-workers 4 --steps 300 --warmup-steps 30 --learning-rate 0.00044 --log-every 1 "
    "--save-every 100000"
)
NATS = 0.05  # by which two curves may differ
LARGE = "--model albert-large --micro-batch-size 32 --sequence-length 512 --warmup 2 --rounds 5"
TINY = "--model albert-tiny --micro-batch-size 2 --sequence-length 64 --warmup 1 --rounds 2"
PEER = {  # by quick, rows; on text each of several shapes is captured once
    (False, "random"): LARGE,
    (False, "text"): "--model albert-base --micro-batch-size 64 --warmup 12 --rounds 9",
    (True, "random"): TINY,
    (True, "text"): TINY,
}
# nvcc works on some of the CPU's cores, while other pieces use the rest.
BUILD = """
import os
os.environ.setdefault("MAX_JOBS", "3")
from deepspeed.ops.op_builder.fused_lamb import FusedLambBuilder
FusedLambBuilder().load(verbose=False)
"""


def measure(
    check: Check, piece: str, seconds: float, *more: object, name: str = "all"
) -> tuple[list[dict], list[Finding]]:
    """The records of a process of gpu_check.measure, and a row about its end."""
    flags = [piece, "--seconds", check.limit(seconds), *["--quick"] * check.quick, *more]
    module = "albert_lab.gpu_check.measure"
    cell = check.run(f"{piece}/{name}", module, *flags, module=True, seconds=seconds)
    records = (cell["result"] or {}).get("records", [])
    what = "the whole process" if name == "all" else f"the whole process, {name}"
    return records, [ended(what, cell, f"{cell.get('seconds')} s")]


def tell(record: dict, says: str = "") -> Finding:
    """A row about one record."""
    figures = ", ".join(f"{name} {value}" for name, value in record.get("found", {}).items())
    text = record.get("error") or says or figures
    return Finding(what=record["what"], passed=record["ok"], says=text)


def measure_and_tell(check: Check, piece: str, seconds: float) -> list[Finding]:
    records, rows = measure(check, piece, seconds)
    return [*map(tell, records), *rows]


def look_at_machine(check: Check) -> list[Finding]:
    records, rows = measure(check, "machine", 60)
    if not records or not records[0]["ok"]:
        return [*map(tell, records), *rows]
    machine = records[0]["found"]
    write_json(check.folder / "hardware.json", machine)
    peak = machine["peak_flops"]
    share = f", {1e12 * machine['bf16_tflops'] / peak:.0%} of the datasheet's" if peak else ""
    copies, waits = machine["copies_gb_s"], machine["microseconds"]
    says = {
        "versions": ", ".join(f"{name} {value}" for name, value in machine["versions"].items()),
        "driver, clocks, power": machine["driver"],
        "memory": f"{machine['memory_bytes'] / 1e9:.0f} GB, "
        f"{machine['memory_bandwidth_gb_s']:.0f} GB/s",
        "matrix products": f"bf16 {machine['bf16_tflops']:.3g} TFLOP/s{share}; fp16 "
        f"{machine['fp16_tflops']:.3g}, fp32 {machine['fp32_tflops']:.3g}",
        "copies, GB/s": f"to the device {copies['pinned_to_device']:.3g} pinned, "
        f"{copies['to_device']:.3g} ordinary; back {copies['to_pinned']:.3g} and "
        f"{copies['to_host']:.3g}",
        "host": f"{machine['cores']} cores, {machine['open_files']} open files; "
        f"{waits['a_launch']:.3g} us a launch, {waits['a_wait']:.3g} us to wait for one",
    }
    return rows + [Finding(what=what, passed=None, says=text) for what, text in says.items()]


def measure_speed(check: Check, piece: str = "speed", seconds: float = 160) -> list[Finding]:
    """Steps of each size with ZeRO-1 on one GPU, and where some spend their time."""
    records, rows = measure(check, piece, seconds, "--data", check.data)
    findings, profiles = [], []
    for record in records:
        turn = record.get("found", {})
        if "tokens_a_second" not in turn:
            findings.append(tell(record))
            continue
        says = f"{turn['tokens_a_second']:,} tokens/s"
        says += f", MFU {turn['mfu']:.1%}" if turn["mfu"] is not None else ""
        says += f"; {turn['peak_gb']} GB, reserved {turn['reserved_gb']}; a step "
        says += (
            f"{turn['step_seconds']:.4f} s ({turn['fastest']:.4f} .. {turn['slowest']:.4f}; 90 %: "
        )
        says += f"{turn['step_seconds_p90']:.4f}), {turn['data_wait']:.1%} of it waiting for data; "
        says += f"host {turn['host_ms']} ms a micro-batch, {turn['update_ms']} an update"
        says += f", {turn['by_graph']:.1%} by graphs" if "by_graph" in turn else ""
        findings.append(tell(record, says))
        if "profile" in turn:
            profiles += tell_profile(findings[-1].what, turn)
    return findings + profiles + rows


def measure_graphs(check: Check) -> list[Finding]:
    """Steps by CUDA graphs: equal to eager ones, and as fast; parts alone if a capture fails."""
    data = ("--data", check.data)
    speed, rows = measure(check, "graph_speed", 75, *data)
    equal, more = measure(check, "graph_equal", 50, *data)
    records, rows = speed + equal, rows + more
    if any(r["ok"] is False or "refused" in r.get("found", {}) for r in records):
        parts, more = measure(check, "graph_parts", 45, *data)
        records, rows = records + parts, rows + more
    return [*map(tell, records), *rows]


def tell_profile(what: str, turn: dict) -> list[Finding]:
    """What a step's kernels take; the host's time is what a step takes longer than they.

    Steps on text differ in size: the profiled one's time is what its tokens take at the median.
    """
    profile = turn["profile"]
    spent = turn["profile"]["kernel_us"] / 1e3
    says = f"{profile['launches']:,.0f} launches a micro-batch; {profile['kernels']} kernels take "
    says += f"{spent:.1f} ms on the device of a step of "
    usual = 1e3 * profile["tokens"] / turn["tokens_a_second"]
    rows = [(f"{what}, profile", f"{says}{usual:.1f} ms")]
    for name, count, us in profile["largest"][:KERNELS]:
        rows.append((f"{us / 1e3 / max(spent, 1e-3):.1%}, {count} times", f"`{name[:90]}`"))
    return [Finding(what=what, passed=None, says=says) for what, says in rows]


def measure_host(check: Check) -> list[Finding]:
    """The host's part of steps on text, with other sources of micro-batches and other settings."""
    findings, ends = [], []
    for name, seconds, more in (("all", 75, ()), ("eager", 40, ("--eager-kernels",))):
        records, rows = measure(check, "host", seconds, "--data", check.data, *more, name=name)
        findings += [tell(record, tell_host(record.get("found", {}))) for record in records]
        ends += rows
    return findings + ends


def tell_host(turn: dict) -> str:
    """The figures of a turn that a table has room for; the records have all."""
    if "operators" in turn:
        return ", ".join(f"{name} {us / 1e3:.1f} ms" for name, _, us in turn["operators"][:KERNELS])
    if not turn:
        return ""
    says = f"host {turn['host_ms']} ms a micro-batch (90 %: {turn['host_ms_p90']}); a step "
    says += f"{turn['step_ms']} ms (90 %: {turn['step_ms_p90']}, {turn['slowest_ms']}), "
    says += f"{turn['cpu_ms']} of CPUs, {turn['collection_ms']} of collections; "
    return says + f"{turn['tokens_a_second']:,} tokens/s"


def train(check: Check) -> list[Finding]:
    """A real pretraining until its time is over, and its curve."""
    seconds = 105
    run = check.folder / "runs" / "train"
    hours = max(check.limit(seconds) - SECONDS_TO_STOP, 5) / 3600
    flags = [*TRAINING[check.quick].split(), "--deepspeed_config", "ds_configs/zero1_bf16.json"]
    flags += ["--learning-rate", "0.00176", "--save-every", "100000", "--max-hours", str(hours)]
    command = ("albert_ds", "train", *flags, "--data", check.data, "--output", run)
    options = {"module": True, "output": False, "seconds": seconds, "codes": (0, Stopped.code)}
    cell = check.run("train/run", *command, **options)
    if cell["code"] != 0:
        return [ended("pretraining", cell)]
    metrics = run / "metrics.jsonl"
    write_file(check.folder / "loss.jsonl", metrics.read_text())
    lines = read_lines(metrics)
    steps = [line for line in lines if "mlm_loss" in line]
    held_out = [line for line in lines if "heldout_mlm_loss" in line]
    if not held_out:
        says = "its time was over before the first evaluation"
        return [Finding(what="pretraining", passed=None, says=says)]
    says = f"{steps[-1]['step']} steps, loss of masked words {steps[0]['mlm_loss']:.3f} .. "
    says += f"{steps[-1]['mlm_loss']:.3f}, held out {held_out[-1]['heldout_mlm_loss']:.3f}; "
    says += f"{median(line['tokens_per_second'] for line in steps):,.0f} tokens/s"
    return [ended("pretraining; its curve is in loss.jsonl", cell, says)]


def compare_curves(check: Check) -> list[Finding]:
    """Two trainings of xlarge, in bf16 and in fp8, on the same batches for as many seconds."""
    if check.quick or torch.cuda.get_device_capability() < (8, 9):
        return [Finding(what="xlarge in fp8", passed=None, says="not run: --quick, or no fp8 here")]
    shipped = ROOT / "ds_configs/zero1_bf16.json"
    changed = check.folder / "fp8.json"
    write_json(changed, {**read_json(shipped), "fp8": {"enabled": True}})
    curves = []
    for kind, config in (("bf16", shipped), ("fp8", changed)):
        seconds = 150
        run = check.folder / "runs" / f"curves-{kind}"
        hours = max(check.limit(seconds) - SECONDS_TO_STOP, 5) / 3600
        flags = (*CURVES.split(), "--deepspeed_config", config, "--max-hours", str(hours))
        command = ("albert_ds", "train", *flags, "--data", check.data, "--output", run)
        options = {"module": True, "output": False, "seconds": seconds, "codes": (0, Stopped.code)}
        cell = check.run(f"fp8curves/{kind}", *command, **options)
        if cell["code"] != 0:
            return [ended(f"pretraining in {kind}", cell)]
        lines = read_lines(run / "metrics.jsonl")
        curves.append({line["step"]: line["mlm_loss"] for line in lines if "mlm_loss" in line})
    steps = sorted(curves[0].keys() & curves[1].keys())
    last = steps[-max(len(steps) // 10, 1) :]
    half, eight = (mean(curve[step] for step in last) for curve in curves)
    says = f"steps {last[0]} to {last[-1]}: {eight:.4f} in fp8, {half:.4f} in bf16"
    return [Finding(what="loss of xlarge", passed=abs(eight - half) <= NATS, says=says)]


def compare_with_peer(check: Check) -> list[Finding]:
    """Hugging Face's model on the same sequences: random rows, and real text."""
    findings = []
    for rows, peers in (("random", ("sdpa", "eager")), ("text", ("sdpa",))):
        flags = [*PEER[check.quick, rows].split(), "--peers", *peers]
        flags += ["--data", check.data] if rows == "text" else []
        flags += ["--deepspeed_config", "ds_configs/zero1_bf16_adamw.json"]
        cell = check.run(f"peer/{rows}", "tools/lab/peer_bench.py", *flags, seconds=60)
        if cell["code"] != 0:
            findings.append(ended(f"Hugging Face's model, rows {rows}", cell))
            continue
        rounds = cell["result"]["rounds"]
        own, *others = rounds[0]
        for kind in others:
            says = f"{spread([turn[kind] / turn[own] for turn in rounds])} times our time"
            what = f"Hugging Face's, {kind}, rows {rows}"
            findings.append(Finding(what=what, passed=None, says=says))
    return findings


def run_gpu_tests(check: Check) -> list[Finding]:
    # Every test starts processes that import for seconds: several at once.
    workers = min(6, os.cpu_count() or 1)
    command = ("pytest", "-q", "-rs", "-o", "addopts=", "-n", workers)
    command += ("-p", "no:cacheprovider", "-p", "no:benchmark")
    # Triton's code needs a real device. The tests of the kernels alone have no marker.
    command += ("-m", "gpu", "-k", "not triton") if check.quick else ()
    command += ("tests/gpu", "tests/model/test_attention.py", "tests/model/test_kernels.py")
    cell = check.run("tests/pytest", *command, module=True, output=False, seconds=180)
    log = check.folder / "cells/tests/pytest.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return [ended("tests on the GPU", cell, (lines or [""])[-1].strip("= "))]


def check_exactness(check: Check) -> list[Finding]:
    """The trainer against a float64 process of Hugging Face's model, in every precision.

    Most of it is the CPU's float64 reference, so three run side by side.
    """
    cells = [("1x1", precision) for precision in PRECISIONS]
    cells += [(grid, precision) for grid in GRIDS for precision in PRECISIONS[:2]]
    cells = cells[:4] if check.quick else cells
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda cell: compare_with_float64(check, *cell), cells))


def compare_with_float64(check: Check, grid: str, precision: str) -> Finding:
    flags = ("--grid", grid, "--precision", precision)
    name = f"exactness/{grid}-{precision}"
    module = "tests.exactness.one"
    cell = check.run(name, module, *flags, module=True, seconds=150)
    what = f"{precision}, {grid} ranks (tensor x data parallel)"
    if cell["result"] is None:
        return ended(what, cell)
    rows = cell["result"]["rows"]
    worst = {k: max(row["off"][k] for row in rows) for k in rows[0]["off"]}
    within = sum(row["within"] for row in rows)
    says = f"{within} of {len(rows)} modes within; "
    says += ", ".join(f"{k} {v:.1e}" for k, v in worst.items())
    return Finding(what=what, passed=within == len(rows), says=says)


def interrupt_and_resume(check: Check) -> list[Finding]:
    flags: list[object] = ["--data", check.data, "--folder", check.folder / "runs" / "resume"]
    flags += ["--quick"] if check.quick else ["--steps", 30]
    module = "tools.lab.fault_check"
    cell = check.run("resume/run", module, "resume", *flags, module=True, seconds=180)
    return [ended("USR1 and KILL, then the same weights bit for bit", cell, said(cell))]


def said(cell: dict) -> str:
    return cell["result"]["says"] if cell["result"] else ""


def use_fused_lamb(check: Check) -> list[Finding]:
    """DeepSpeed's LAMB, which nvcc builds first."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        return [Finding(what="FusedLamb", passed=None, says="not run: no nvcc")]
    built = check.run("fusedlamb/build", "-c", BUILD, output=False, seconds=120)
    if built["code"] != 0:
        return [ended("nvcc builds FusedLamb", built)]
    config = read_json(ROOT / "ds_configs/zero0_fp32.json")
    config["optimizer"]["type"] = "FusedLamb"
    write_json(check.folder / "fused_lamb.json", config)
    command = ("tools/throughput_bench.py", "--models", "albert-tiny", "--micro-batch", 4)
    command += ("--rounds", 2, "--ranks", 1, "--steps", 2, "--sequence-length", 64)
    command += ("--deepspeed_config", check.folder / "fused_lamb.json")
    cell = check.run("fusedlamb/steps", *command, seconds=40)
    return [ended("FusedLamb takes steps", cell, f"built in {built['seconds']} s")]


def use_all_gpus(check: Check) -> list[Finding]:
    """NCCL, its traffic, tensor parallelism, and what happens when a rank is lost."""
    if check.gpus < 2:
        return [Finding(what="two or more GPUs", passed=None, says="not run: one GPU is present")]
    model = "albert-tiny" if check.quick else "albert-large"
    small = ("--sequence-length", 64) if check.quick else ()
    several = ("--ranks", f"1,{check.gpus}", "--tensor-parallel", "1,2", *small)
    several += ("--micro-batch", 2 if check.quick else 32)
    bench = ("tools/throughput_bench.py", "--models", model, *several)
    speed = check.run("gpus/speed", *bench, seconds=300)
    findings = [ended("data and tensor parallel steps", speed)]
    for cell in speed["result"]["cells"] if speed["code"] == 0 else ():
        turns = sorted(cell["rounds"], key=lambda turn: turn["seconds_a_step"])
        turn = turns[len(turns) // 2]
        waited = turn["communication_seconds"] / turn["seconds_a_step"]
        says = f"{turn['samples_a_second']:.4g} samples/s, {waited:.0%} of the step waits for ranks"
        what = f"{model}, {cell['ranks']} ranks, tensor parallel {cell['tensor_parallel']}"
        findings.append(Finding(what=what, passed=None, says=says))
    config = ("--deepspeed_config", "ds_configs/zero1_bf16.json", "--models", model)
    ranks = ("--measure", "--ranks", check.gpus)
    volume = check.run("gpus/traffic", "tools/comm_volume.py", *config, *ranks, seconds=300)
    findings.append(ended("bytes of each kind", volume, "in cells/gpus/traffic.log"))
    for word in ("KILL", "STOP"):
        flags = ("lost", "--signal", word, "--data", check.data)
        folder = ("--folder", check.folder / "runs" / f"lost-{word}")
        module = "tools.lab.fault_check"
        cell = check.run(f"gpus/{word}", module, *flags, *folder, module=True, seconds=280)
        findings.append(ended(f"a rank gets SIG{word}", cell, said(cell)))
    return findings


PIECES: dict[str, Callable[[Check], list[Finding]]] = {
    "machine": look_at_machine,
    "smoke": partial(measure_and_tell, piece="smoke", seconds=90),
    "speed": measure_speed,
    "rates": partial(measure_and_tell, piece="rates", seconds=60),
    "graphs": measure_graphs,
    "host": measure_host,
    "train": train,
    "peer": compare_with_peer,
    "fp8": partial(measure_and_tell, piece="fp8", seconds=40),
    "fp8steps": partial(measure_speed, piece="fp8steps", seconds=70),
    "fp8curves": compare_curves,
    "gpus": use_all_gpus,
    "resume": interrupt_and_resume,
    "exactness": check_exactness,
    "tests": run_gpu_tests,
    "fusedlamb": use_fused_lamb,
}
# These are right or wrong at any speed, so they share the GPU after the others.
SHARING = ("resume", "exactness", "tests", "fusedlamb")


def run_pieces(check: Check, chosen: list[str]) -> bool:
    """Run these pieces, the most wanted first; returns whether nothing has failed."""
    is_good = True
    for name in PIECES:
        if name in chosen and name not in SHARING:
            PIECES[name](check)
            is_good = check.write_report(PIECES)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        sharing = [pool.submit(PIECES[name], check) for name in SHARING if name in chosen]
        try:
            for piece in as_completed(sharing):
                piece.result()
                is_good = check.write_report(PIECES)
        except BaseException:
            check.ends = 0  # nothing more starts
            raise
    return is_good


def build_text(check: Check) -> str:
    """A folder of shards made of this Python's own documentation; for a check without --data."""
    text, vocab = check.folder / "text.txt", check.folder / "vocab"
    size, length = (200_000, 64) if check.quick else (4_000_000, 512)
    pieces = 800 if check.quick else 8000
    shards = check.folder / "shards"
    input_ = ("--input", text)
    commands = {
        "corpus": ("tools/demo/demo_corpus.py", "--max-bytes", size, "--output", text),
        "vocab": ("tools/build_vocab.py", *input_, "--vocab-size", pieces, "--output", vocab),
        "shards": (
            *("tools/build_shards.py", *input_, "--vocab", vocab / "spiece.model"),
            *("--sequence-length", length, "--holdout", 0.05, "--output", shards),
        ),
    }
    for name, command in commands.items():
        cell = check.run(f"text/{name}", *command, output=False, seconds=300)
        if cell["code"] != 0:
            raise UserError(f"no text for the check: {cell['last_words']}; allowed: --data")
    return str(shards)
